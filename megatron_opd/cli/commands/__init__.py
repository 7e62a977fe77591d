"""Holds one file for each subcommand of `opd`: its options and what it does with them."""
