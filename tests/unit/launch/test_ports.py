"""Ports that the processes of a job get."""

import socket

import pytest

from megatron_opd.launch.launcher import CannotPlace
from megatron_opd.launch.ports import END, FIRST, SPAN, JobPorts, is_taken


def free(host: str, port: int) -> bool:
    return False


def test_two_jobs_do_not_meet():
    one, other = JobPorts(17, free), JobPorts(18, free)
    ports = [jobs.take("n") for _ in range(SPAN) for jobs in (one, other)]
    assert len(set(ports)) == 2 * SPAN
    assert all(FIRST <= port < END for port in ports)


@pytest.mark.parametrize("job", [1, 119, 120, 2**31])
def test_every_job_has_them_all_in_the_end(job: int):
    ports = JobPorts(job, free)
    assert sorted(ports.take("n") for _ in range(END - FIRST)) == list(range(FIRST, END))
    with pytest.raises(CannotPlace, match=r"every port of 20000\.\.31999 of n"):
        ports.take("n")


def test_a_port_that_something_listens_on_is_passed_over():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not is_taken("127.0.0.1", port)
        listener.listen()
        assert is_taken("127.0.0.1", port)
    busy = JobPorts(0, lambda host, port: (host, port) == ("n1", FIRST))
    assert [busy.take("n1"), busy.take("n2")] == [FIRST + 1, FIRST + 2]
