"""The packages of megatron_opd: their layers, and what each may import.

tests/unit/repository/test_import_rules.py enforces it, tools/package_map.py writes it down. A
package imports from the layers before its own, and from its own where that makes no circle.
"""

LAYERS = (
    {"errors", "records"},
    {"config"},
    {
        *("output", "models", "buffer", "losses", "data", "batching", "metrics", "wire"),
        *("environments", "teacher_apis"),
    },
    {"sizing", "transport", "checkpoint", "weight_sync", "rollout"},
    {"learner", "controller", "data_workers", "report"},
    {"inputs"},
    {"launch"},
    {"fleet"},
    {"watch", "evaluation", "mismatch", "sites", "sim"},
    {"run"},
    {"cli"},
    {"__main__"},
)
ONLY = {
    "records": set[str](),
    "losses": {"records", "config"},
    "controller": {"records", "config", "buffer", "metrics"},
    "sizing": {"config", "models"},
    "wire": {"config"},
    "teacher_apis": set[str](),
    "watch": {"metrics", "report"},
    "report": {"records", "config", "metrics", "checkpoint"},
    "__main__": {"cli"},
}
"""Stricter than the layer: what these import at most."""
TORCH_FREE = {
    *("errors", "records", "config", "buffer", "batching", "controller", "rollout", "data"),
    *("metrics", "sizing", "launch", "fleet", "run", "sim", "report", "watch", "wire", "sites"),
    *("evaluation", "mismatch", "environments", "teacher_apis"),
}
AROUND = {
    "harness": set[str](),
    "benchmarks": {"harness"},
    "checks": {"harness", "benchmarks"},
    "studies": {"harness", "benchmarks"},
}
"""What stands around the product, and which of it each may import; the product imports none."""
SERVES = {"inputs", "launch", "evaluation", "mismatch", "sites", "run", "cli"}
"""What starts servers, or says what they are started with."""
