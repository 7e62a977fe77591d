"""The tables of options against the installed SGLang: every one is allowed or refused by name."""

from sglang_bridge.server import option_rules, options
from sglang_bridge.server.entry import offer_standins


def test_every_option_is_named_once_and_exists():
    tables = (
        set(option_rules.DECIDED),
        set(option_rules.EVERYBODY),
        set(option_rules.STUDENTS),
        option_rules.TEACHERS,
        option_rules.ALLOWED,
    )
    listed = [name for table in tables for name in table]
    assert sorted(listed) == sorted(set(options.names_by_option().values()))


def test_every_field_of_the_installed_server_arguments_is_named():
    """Red as soon as the pinned SGLang gains a field, an option for it or not."""
    offer_standins()
    from sglang.srt.server_args import ServerArgs

    named = set(options.names_by_option().values()) | option_rules.WITHOUT_OPTION
    assert set(ServerArgs.__struct_fields__) - named == set()


def test_an_option_that_no_table_names_is_refused():
    assert option_rules.why_refused("made_up", "teacher") is not None
