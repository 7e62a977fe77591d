"""Stand-ins for Slurm's programs: they describe made-up nodes and run on this machine."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

# What `scontrol` 22.05 prints, shortened where nothing reads it.
SCONTROL = """
import json, os, re, sys

nodes = json.load(open(os.path.join(os.path.dirname(__file__), "nodes.json")))
words = [word for word in sys.argv[1:] if not word.startswith("--")]


def expanded(expression):
    for prefix, ranges, plain in re.findall(r"(\\w+)\\[([^]]*)\\]|([^,]+)", expression):
        for part in ranges.split(",") if ranges else []:
            first, _, last = part.partition("-")
            yield from (f"{prefix}{i}" for i in range(int(first), int(last or first) + 1))
        if plain:
            yield plain


if words[:2] == ["show", "hostnames"]:
    print("\\n".join(expanded(words[2])))
elif words[:2] == ["show", "job"]:
    print(f"JobId={words[2]} JobName=job.slurm")
    print("   ReqNodeList=(null) ExcNodeList=(null)")
    print(f"   NodeList={','.join(node['name'] for node in nodes)}")
    print("   JOB_GRES=gpu:8")
    for node in nodes:
        print(f"     Nodes={node['name']} CPU_IDs=0-7 Mem=0 GRES={node['gres']}")
elif words[:2] == ["show", "node"]:
    wanted = list(expanded(words[2]))
    for node in nodes:
        if node["name"] in wanted:
            where = f"NodeAddr={node['address']} NodeHostName=vm Port=16801"
            print(f"NodeName={node['name']} Arch=x86_64 Gres=gpu:4 {where} State={node['state']}")
else:
    sys.exit(f"invalid entity: {words}")
"""
# Like Slurm it sets as many of the job's GPUs as are asked for, and hands on its input.
SRUN = """
import json, os, sys

options = dict(word.partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
nodes = json.load(open(os.path.join(os.path.dirname(__file__), "nodes.json")))
(node,) = (node for node in nodes if node["name"] == options["--nodelist"])
wanted = options.get("--gpus-per-node") or os.environ.get("SLURM_GPUS_PER_NODE")
if node["visible"]:
    visible = node["visible"].split(",")[: wanted and int(wanted)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
os.environ["SLURMD_NODENAME"] = node["name"]
os.execvp(command[0], command)
"""


@dataclass
class StandInNode:
    """A node that is not there. gres: what the job has of it. visible: CUDA_VISIBLE_DEVICES."""

    name: str
    gres: str = ""
    visible: str = ""
    address: str = "127.0.0.1"
    state: str = "ALLOCATED"


class StandInSlurm:
    """Slurm's programs in a folder, and the nodes that they describe."""

    def __init__(self, folder: Path, *nodes: StandInNode) -> None:
        self.folder, self.nodes = folder, nodes
        folder.mkdir(exist_ok=True)
        for name, program in (("scontrol", SCONTROL), ("srun", SRUN)):
            (folder / name).write_text(f"#!{sys.executable}\n{program}")
            (folder / name).chmod(0o755)
        self.describe()

    def describe(self) -> None:
        """Say what the nodes are now."""
        (self.folder / "nodes.json").write_text(json.dumps([asdict(node) for node in self.nodes]))

    def enter(self, monkeypatch: pytest.MonkeyPatch, job: int = 4711) -> None:
        """From here on this process is in a job."""
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.delenv("SLURMD_NODENAME", raising=False)
