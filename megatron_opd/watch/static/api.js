// Asks the server. An answer that is no success becomes an error with the server's one line.

export class Refused extends Error {
  constructor(status, text) {
    super(text || `status ${status}`);
    this.status = status;
  }
}

export async function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const address = query.size ? `${path}?${query}` : path;
  const response = await fetch(address, { signal, credentials: "same-origin" });
  if (!response.ok) throw new Refused(response.status, (await response.text()).trim());
  return response.json();
}
