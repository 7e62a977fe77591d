"""A rank of a test on which NVIDIA apex is installed: a stand-in with its names, which counts.

Started as a program, because Megatron looks for apex when it is imported. The stand-in has apex's
interface (the step is counted in the parameter group, not in a parameter's state) and plain
arithmetic: what its kernels compute, a GPU alone can tell.
"""

import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CALLS: Counter[str] = Counter()
BUILT: list[dict[str, Any]] = []


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the arguments and the states of apex's."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool,
        weight_decay: float,
        capturable: bool,
    ) -> None:
        assert adam_w_mode
        assert not capturable, "that is for CUDA graphs"
        BUILT.append({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        CALLS["FusedAdam.step"] += 1
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                square = parameter.grad.square()
                state["exp_avg_sq"].mul_(second).add_(square, alpha=1 - second)
                mean = state["exp_avg"] / (1 - first**step)
                root = (state["exp_avg_sq"] / (1 - second**step)).sqrt()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (root + group["eps"]))


def multi_tensor_scale(chunk: int, flag: Any, tensors: Any, scale: Any) -> None:
    """Scaled copies; the second list may be the first."""
    CALLS["multi_tensor_scale"] += 1
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)


def multi_tensor_applier(kernel: Callable[..., Any], flag: Any, tensors: Any, *more: Any) -> Any:
    """Call a kernel with apex's chunk size."""
    return kernel(2048 * 32, flag, tensors, *more)


def wgrad_gemm_accum_fp32(given_TH: Any, grad_TO: Any, main_grad_OH: Any) -> None:
    """Add a weight's gradient to its float32 buffer."""
    CALLS["wgrad_gemm_accum_fp32"] += 1
    main_grad_OH.add_(grad_TO.t().matmul(given_TH))


def install(**modules: dict[str, Any]) -> None:
    """Make modules that `import` and `find_spec` find; __ in a name is a dot."""
    for key, names in modules.items():
        name = key.replace("__", ".")
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == "apex")
        module.__path__ = []
        vars(module).update(names)


def main(out: Path, arguments: dict[str, Any]) -> None:
    """jobs.update with apex, with the kernels that a GPU machine with it would choose."""
    install(
        apex={},
        apex__optimizers={"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        apex__multi_tensor_apply={"multi_tensor_applier": multi_tensor_applier},
        amp_C={"multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": None},
        fused_weight_gradient_mlp_cuda={"wgrad_gemm_accum_fp32": wgrad_gemm_accum_fp32},
    )
    from megatron_opd.learner import learner, world
    from megatron_opd.learner.state.optimizer import step_count
    from tests.dist import jobs

    choose, made = world.choose_kernels, learner.MegatronLearner
    chosen = choose(True)
    world.choose_kernels = lambda cuda: chosen
    kept: list[Any] = []

    def keep(*given: Any, **named: Any) -> Any:
        kept.append(made(*given, **named))
        return kept[0]

    jobs.MegatronLearner = keep  # type: ignore[misc]
    jobs.update(out, **arguments)
    fused = sum(
        bool(getattr(module, "gradient_accumulation_fusion", False))
        for chunk in kept[0].model
        for module in chunk.modules()
    )
    report = {
        "reasons": dict(chosen.reasons),
        "calls": CALLS,
        "built": BUILT,
        "fused_layers": fused,
        "steps": step_count(kept[0].optimizer),
    }
    (out / "apex.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), pickle.loads(sys.stdin.buffer.read()))
