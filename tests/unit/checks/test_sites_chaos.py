"""What the check of broken links and lying sites calls broken, and what it does to them."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks.link.proxy import Proxy
from checks.sites_chaos import broken as chaos
from checks.sites_chaos import failures, faulty
from checks.sites_chaos.checks import Record, broken_promises
from checks.sites_chaos.harmed import ToldFaults, faults_told
from checks.sites_chaos.liar import AHEAD, HONEST, KINDS, SERVING, lying
from checks.sites_chaos.parties import Party, proxied
from megatron_opd.sites import site_weights
from megatron_opd.sites.checking import Forged, received_sample
from megatron_opd.sites.outbox import Finished
from megatron_opd.sites.sampling import SiteSampling
from tests.support.fakes import make_prompt
from tests.support.hub_links import RULES, done_of, sample_of

Tree = dict[str, Any]
UPDATES, BATCH, SLOTS = 3, 4, 2
ADMITTED = 16
PROMPT = make_prompt(0)


def row(uid: int, update: int, site: str = "near") -> Tree:
    return {"uid": uid, "update": update, "version": update, "engine": site, "spans": [[0, 0, 1]]}


def drop(uid: int, reason: str = "too_late") -> Tree:
    return {"uid": uid, "update": 0, "version": None, "drop_reason": reason, "spans": []}


def sound(**summary: Any) -> Record:
    """Three updates of four samples; prompt 1 was dropped, three are unused at the end."""
    uids = [0, *range(2, 13)]
    trained = [row(uid, at // BATCH, "near" if at % 3 else "far") for at, uid in enumerate(uids)]
    told = {"status": "finished", "updates": UPDATES, "samples_admitted": ADMITTED}
    told |= {"samples_consumed": 12, "samples_dropped": {"too_late": 1}, "samples_in_flight": 3}
    rows = [{"update": update} for update in range(UPDATES)]
    return Record(told | summary, rows, trained, [drop(1)])


def found_in(record: Record) -> str:
    return "; ".join(broken_promises(record, UPDATES, BATCH, SLOTS))


SOUND = sound()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (sound(status="failed"), "failed after 3 of 3"),
        (sound(updates=2), "finished after 2 of 3"),
        (replace(SOUND, updates=SOUND.updates[:2]), r"of updates \[0, 1\]"),
        (replace(SOUND, trained=[*SOUND.trained, row(5, 1)]), r"trained on twice: \[5\]"),
        (replace(SOUND, trained=SOUND.trained[1:]), "11 samples, 12 consumed"),
        (replace(SOUND, trained=SOUND.trained[1:]), r"not 4 samples in updates \[0\]"),
        (replace(SOUND, trained=SOUND.trained[1:]), "4 unused, 3 in flight"),
        (replace(SOUND, dropped=[]), "dropped {}, counted {'too_late': 1}"),
        (replace(SOUND, dropped=[drop(1, "aborted")]), "dropped {'aborted': 1}, counted"),
        (replace(SOUND, dropped=[drop(1), drop(2)]), r"trained on as well: \[2\]"),
        (replace(SOUND, dropped=[drop(1), drop(1)]), r"trained on as well: \[1\]"),
        (sound(samples_admitted=12), r"never admitted: \[12\]"),
        (sound(samples_admitted=60, samples_in_flight=47), r"lost: \[13, 14, 15, "),
    ],
)
def test_what_does_not_hold_is_named(record: Record, words: str):
    assert found_in(SOUND) == ""
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found_in(record))


def test_a_record_is_read_of_what_a_run_left(tmp_path: Path):
    assert Record.read(tmp_path).summary == {}
    (tmp_path / "summary.json").write_text(json.dumps(SOUND.summary))
    lines = [json.dumps(each) + "\n" for each in (*SOUND.trained, *SOUND.dropped)]
    (tmp_path / "rollouts.jsonl").write_text("".join(lines) + '{"uid": 9')
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in SOUND.updates))
    record = Record.read(tmp_path)
    assert record == SOUND
    assert (record.unused, record.versions) == ([13, 14, 15], [0])
    assert record.counts()["samples_by_site"] == {"far": 4, "near": 8}


def broken_links(**changes: Any) -> Tree:
    """The figures of a run with broken links in which all is well."""
    site = {"samples_refused": 0, "state": "away", "chunks_refused": {"a chunk": 3}}
    every = dict.fromkeys(("damaged", "repeated", "replayed", "lost"), 1)
    counts = {"weights_refused": {}, "records_refused": {}}
    figures: Tree = {"exit_codes": {"opd run": 0, "near": 0, "far": 0}, "kills": 10}
    figures |= {"processes_left": [], "tracebacks": 0, "cuts": {"near": 9, "far": 11}}
    figures |= {"faults_below_the_encryption": dict.fromkeys(("learner", "near", "far"), every)}
    figures |= {"sites": {"members": {"near": site | {"starts": 1}, "far": site | {"starts": 11}}}}
    return figures | {"counted_by_sites": {"near": counts, "far": counts}} | changes


def members(name: str, **changes: Any) -> Tree:
    told = broken_links()["sites"]["members"]
    return {"sites": {"members": told | {name: told[name] | changes}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exit_codes": {"opd run": 0, "near": 0, "far": 1}}, "exit codes"),
        ({"processes_left": ["sglang"]}, r"left \['sglang'\]"),
        ({"tracebacks": 2}, "2 tracebacks"),
        ({"kills": 9}, "9 kills"),
        ({"cuts": {"near": 9, "far": 10}}, "too few"),
        ({"faults_below_the_encryption": {"near": {"lost": 3}}}, "near did not do every fault"),
        (members("near", samples_refused=1), "a sound site was found faulty: near"),
        (members("far", state="quarantined"), "a sound site was found faulty: far"),
        (members("far", chunks_refused={}), "no chunk of far"),
        (members("far", starts=10), "10 starts of far"),
        ({"counted_by_sites": {"near": {}}}, "counted nothing"),
    ],
)
def test_a_run_with_broken_links_that_is_not_well_is_named(
    changes: Tree, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chaos, "UPDATES", UPDATES)
    monkeypatch.setattr(chaos, "BATCH", BATCH)
    assert "samples of the versions [0] alone" in chaos.broken(broken_links(), SOUND)
    monkeypatch.setattr(chaos, "LEAST_VERSIONS", 1)
    assert chaos.broken(broken_links(), SOUND) == []
    with pytest.raises(AssertionError, match=words):
        raise AssertionError("; ".join(chaos.broken(broken_links(**changes), SOUND)))
    control = chaos.control(SOUND)
    assert len(control) == 4
    assert all(control.values())
    of_one = replace(SOUND, trained=[each | {"engine": "near"} for each in SOUND.trained])
    assert "samples of {'near': 12}" in chaos.broken(broken_links(), of_one)


def liars(kind: str = KINDS[0], **changes: Any) -> Tree:
    """The figures of a run with liars in which all is well; `changes` are of the one of `kind`."""
    said = ["error: the learner's site ended this site's part: site x is quarantined: a lie"]
    told = {"state": "quarantined", "samples_trained_on": 0, "samples_refused": 3}
    told |= {"said": said, "tracebacks": 0}
    codes = dict.fromkeys(KINDS, 2) | dict.fromkeys(("opd run", *faulty.SOUND), 0)
    one = {kind: told | changes}
    sound_sites = {name: {"state": "away", "samples_refused": 0} for name in faulty.SOUND}
    return {
        "liars": dict.fromkeys(KINDS, told) | one,
        "exit_codes": codes,
        "sound": sound_sites,
    }


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (liars(state="away"), "versions is away, not quarantined"),
        (liars(said=["error: a", "error: b"]), "other than one line"),
        (liars(said=["error: no disk"]), "other than one line"),
        (liars(tracebacks=1), "versions: 1 tracebacks"),
        (liars(samples_trained_on=1), "or trained on"),
        (liars("zeros", samples_trained_on=4), "zeros: not counted, or trained on"),
        (liars(samples_refused=2), "not counted"),
        (liars() | {"exit_codes": {}}, "exit codes {}"),
        (liars() | {"sound": {"near": {"state": "quarantined"}}}, "found faulty: near"),
        (liars() | {"sound": {"elsewhere": {}}}, "no sample of elsewhere"),
    ],
)
def test_a_liar_that_is_not_found_is_named(
    figures: Tree, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(faulty, "UPDATES", UPDATES)
    monkeypatch.setattr(faulty, "BATCH", BATCH)
    assert faulty.broken(liars(), SOUND) == []
    assert faulty.broken(liars("zeros", samples_trained_on=3), SOUND) == []
    with pytest.raises(AssertionError, match=words):
        raise AssertionError("; ".join(faulty.broken(figures, SOUND)))


def test_every_part_and_every_control_can_fail():
    well = {"broken": {"broken": [], "control": {"a": ["found"]}}, "faulty": {"broken": []}}
    assert failures(well) == []
    found = failures({"broken": {"broken": ["lost"], "control": {"a": []}}})
    assert found == ["broken: lost", "control: not found: a"]
    assert failures({"faulty": {"broken": ["it"]}}) == ["faulty: it"]
    assert failures({"broken": {"broken": [], "control": {}}}) == [
        "control: there is no record to spoil"
    ]


def encoded(kind: str) -> Finished:
    sampling = SiteSampling.__new__(SiteSampling)
    sampling._vocab_sizes, sampling._num_draws = {}, 0
    with lying(kind):
        return sampling._encoded(sample_of(PROMPT, version=3))


async def received(finished: Finished):
    return received_sample(
        RULES,
        PROMPT,
        done_of(0),
        finished.frames,
        may_have=lambda version: version <= 3,
        scores=True,
        site="liar",
        delay_s=0.0,
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [("versions", "version 1003, which"), ("above", "above 0"), ("zeros", "more than 1")],
)
def test_a_lie_that_a_sample_shows_is_refused(kind: str, words: str):
    with pytest.raises(Forged, match=words):
        asyncio.run(received(encoded(kind)))


def test_log_probs_that_are_too_low_look_like_a_sample():
    sound_logp = asyncio.run(received(encoded(HONEST))).rollout.geometric_logps[0]
    forged_logp = asyncio.run(received(encoded("below"))).rollout.geometric_logps[0]
    assert forged_logp == pytest.approx(sound_logp - 1.0, abs=1e-6)


def test_a_site_that_lies_about_what_it_serves_names_a_version_that_is_not_there():
    with lying(SERVING):
        assert site_weights.Serving(2).version == 2 + AHEAD
    assert site_weights.Serving(2).version == 2
    with (
        pytest.raises(ValueError, match="unknown lie 'none'; choices: honest, versions"),
        lying("none"),
    ):
        pass


def test_faults_are_told_as_they_happen(tmp_path: Path):
    told = tmp_path / "faults"
    assert faults_told(told) == {}
    harm = ToldFaults(1.0, 0, told)
    sent: list[Any] = []
    for _ in range(40):
        harm.put(sent.append, [b"head", b"body"])
    assert faults_told(told) == harm.done
    assert sum(harm.done.values()) == 40
    assert min(harm.done.values()) > 0
    with told.open("a") as file:
        file.write('{"damaged": 9')  # killed meanwhile
    assert faults_told(told) == harm.done


def test_a_proxy_in_a_thread_forwards_until_it_cuts():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answers: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(100):
                    answers.append(data)

        serving = threading.Thread(target=answer)
        serving.start()
        proxy = Proxy(server.getsockname()[1], cut_after=lambda: 5)
        with proxied(proxy) as address:
            port = int(address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"abcdefgh")
                try:
                    ended = client.recv(1)
                except ConnectionResetError:
                    ended = b""
            serving.join()
    assert ended == b""
    assert b"".join(answers) in (b"", b"abcde")  # an abort may leave nothing to read
    assert (proxy.cuts, proxy.connections) == (1, 1)


def test_a_kill_is_of_the_site_alone_and_what_stays_is_named(tmp_path: Path):
    party = Party.__new__(Party)
    party._orphans = []
    spawn = "import subprocess, sys; p = [sys.executable, '-c', 'input()']; "
    spawn += "subprocess.Popen(p, stdin=0); print(1, flush=True); input()"
    command = [sys.executable, "-c", spawn]
    with ExitStack() as stack:
        site = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert site.stdout is not None
        assert site.stdin is not None
        site.stdout.readline()
        assert party.kill(site) == 1
        (orphan,) = party._orphans
        assert orphan.is_running()
        site.stdin.close()  # which ends its child
        assert party.left() == []
