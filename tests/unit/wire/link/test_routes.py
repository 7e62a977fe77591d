"""Of each name one process is heard, on its newest connection."""

from megatron_opd.wire.link.routes import FORMER_KEPT, Greeting, Routes

A, B, C = b"a", b"b", b"c"


def test_a_newer_connection_of_the_same_process_replaces_the_older():
    routes = Routes(["site"])
    assert routes.greet("site", A, 1) is Greeting.NEW
    assert routes.put("site", A, 1, b"r1") is None
    assert routes.put("site", A, 2, b"r2") is None
    assert routes.is_on("site", b"r2")
    assert not routes.is_on("site", b"r1")
    assert routes.greet("site", A, 2) is Greeting.OLD
    assert routes.greet("site", A, 1) is Greeting.OLD
    assert routes.greet("site", A, 3) is Greeting.NEW


def test_a_process_that_was_replaced_does_not_come_back():
    routes = Routes(["site", "other"])
    routes.put("site", A, 5, b"r1")
    assert routes.greet("site", B, 1) is Greeting.NEW
    assert routes.put("site", B, 1, b"r2") == b"r1"
    assert routes.greet("site", A, 6) is Greeting.FORMER
    assert routes.greet("other", A, 6) is Greeting.NEW
    assert routes.put("site", C, 1, b"r3") == b"r2"
    assert routes.greet("site", B, 2) is Greeting.FORMER


def test_a_process_is_replaced_although_its_connection_has_ended():
    routes = Routes(["site"])
    routes.put("site", A, 1, b"r1")
    assert routes.end("site", b"r1")
    assert not routes.end("site", b"r1")
    assert routes.put("site", B, 1, b"r2") is None
    assert routes.greet("site", A, 2) is Greeting.FORMER


def test_the_end_of_an_older_connection_leaves_the_newer():
    routes = Routes(["site"])
    routes.put("site", A, 1, b"r1")
    routes.put("site", A, 2, b"r2")
    assert not routes.end("site", b"r1")
    assert routes.is_on("site", b"r2")


def test_a_process_that_is_banished_is_not_heard():
    routes = Routes(["site"])
    routes.put("site", A, 1, b"r1")
    routes.banish("site", A)
    assert not routes.is_on("site", b"r1")
    assert routes.greet("site", A, 2) is Greeting.FORMER


def test_so_many_processes_are_remembered_and_no_more():
    routes = Routes(["site"])
    for number in range(FORMER_KEPT + 2):
        routes.put("site", bytes([number]), 1, b"r")
    assert routes.greet("site", bytes([1]), 2) is Greeting.FORMER
    assert routes.greet("site", bytes([0]), 2) is Greeting.NEW
