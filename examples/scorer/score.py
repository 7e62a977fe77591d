"""Scores ids of every position and draws others: python examples/scorer/score.py URL [KEY]."""

import json
import sys
import urllib.request

url, key = [*sys.argv[1:], ""][:2]
prompt, answer, ids = [9, 4, 12, 7], [5, 8, 6], [[5, 3], [8], [6, 1, 2]]
asked = {"input_ids": prompt + answer, "runs": [[4, 7]], "ids": ids, "num_draws": 16}
headers = {"Authorization": f"Bearer {key}"}
request = urllib.request.Request(f"{url}/bridge/score", json.dumps(asked).encode(), headers)
scored = json.load(urllib.request.urlopen(request))
for *row, drawn in zip(ids, scored["logp"], scored["selected"]["ids"], strict=True):
    print("ids {}: log-probs {}".format(*row), "; drawn:", drawn)
