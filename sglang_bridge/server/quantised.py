"""Holds matrices as numbers of one byte and a scale for every row, whatever the device.

Linear layers and experts have the parameters of SGLang's w8a8_int8 and w8a8_fp8: `weight` and
`weight_scale` [rows, 1]. An ordinary checkpoint is quantised while it is loaded, each matrix as a
whole and in the server's dtype, so that a server holds what a weight sync of the same weights would
give it, bit for bit. On a GPU SGLang's own kernels multiply, and quantise activations too. On a
CPU, where those do not run, a layer de-quantises its matrix for each product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE, FusedMoeWeightScaleSupported
from sglang.srt.layers.quantization.base_config import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import set_weight_attrs
from torch.nn import Parameter
from torch.nn.functional import linear

from sglang_bridge.weights.formats import HELD_AS, Format, is_quantised
from sglang_bridge.weights.quantise import dequantised, quantised, row_maxima, row_scales

Load = Callable[..., None]


class RowScaledConfig(QuantizationConfig):
    """Chooses how each layer is held, for SGLang. format: of the numbers."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        self.format: Format = format

    def get_name(self) -> str:
        """Returns the name of SGLang's method with the same parameters."""
        return f"w8a8_{self.format}"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes that a server may compute in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns the least CUDA capability, times ten, that SGLang's kernels demand."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns no names: checkpoints are ordinary ones."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RowScaledConfig:
        """Raises ValueError: a checkpoint that is quantised already is not taken."""
        raise ValueError("the checkpoint is quantised already")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns how `layer` is held; None: as SGLang holds it otherwise."""
        if isinstance(layer, FusedMoE):
            return RowScaledExperts(self.format)
        if not isinstance(layer, LinearBase):
            return None
        if is_quantised(f"{prefix}.weight", 2):
            return RowScaledLinear(self.format)
        return UnquantizedLinearMethod()

    def get_scaled_act_names(self) -> list[str]:
        """Returns no names: activations are not scaled."""
        return []


class RowScaledLinear(LinearMethodBase):
    """Holds and multiplies the matrix of a linear layer."""

    def __init__(self, format: Format) -> None:
        self.format: Format = format
        self._kernel = _linear_kernel(format) if torch.cuda.is_available() else None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Load,
        **_: Any,
    ) -> None:
        """Registers `weight` and `weight_scale`; what loads the first fills both."""
        rows = sum(output_partition_sizes)
        layer.register_parameter("weight", _numbers(rows, input_size_per_partition, of=self.format))
        layer.register_parameter("weight_scale", _scales(rows))

        def load(parameter: Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            numbers, scales = _quantise(loaded, parameter, params_dtype, self.format)
            weight_loader(parameter, numbers, *shard)
            weight_loader(layer.weight_scale, scales, *shard)

        set_weight_attrs(layer.weight, {"input_dim": 1, "output_dim": 0, "weight_loader": load})
        set_weight_attrs(layer.weight_scale, {"output_dim": 0, "weight_loader": weight_loader})

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x times the matrix, transposed, plus the bias."""
        if self._kernel is not None:
            # SGLang's kernels read the matrix transposed: here a view, so that what is received
            # into the parameter needs nothing done to it
            as_theirs: Any = SimpleNamespace(
                weight=layer.weight.t(), weight_scale=layer.weight_scale, input_scale=None
            )
            return self._kernel.apply(as_theirs, x, bias)
        return linear(x, dequantised(layer.weight, layer.weight_scale, x.dtype), bias)


class RowScaledExperts(FusedMoEMethodBase):
    """Holds and multiplies the matrices of a layer's experts."""

    def __init__(self, format: Format) -> None:
        self.format: Format = format
        self._kernel = _experts_kernel(format) if torch.cuda.is_available() else None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Load,
        with_bias: bool = False,
        **_: Any,
    ) -> None:
        """Registers w13 (gate and up) and w2 (down) and their scales; loading fills both."""
        if with_bias:
            raise ValueError("experts with biases are not supported with quantization")

        def load(
            parameter: Parameter,
            loaded: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
        ) -> None:
            if layer._map_global_expert_id_to_local_expert_id(expert_id) == -1:
                return  # another rank's
            numbers, scales = _quantise(loaded, parameter, params_dtype, self.format)
            weight_loader(parameter, numbers, weight_name, shard_id, expert_id)
            scale = layer.w2_weight_scale if shard_id == "w2" else layer.w13_weight_scale
            weight_loader(scale, scales, f"{weight_name}_scale", shard_id, expert_id)

        shapes = {
            "w13_weight": (2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (hidden_size, intermediate_size_per_partition),
        }
        for name, (rows, columns) in shapes.items():
            numbers = _numbers(num_experts, rows, columns, of=self.format)
            set_weight_attrs(numbers, {"weight_loader": load})
            scales = _scales(num_experts, rows)
            by_row = FusedMoeWeightScaleSupported.CHANNEL.value
            set_weight_attrs(scales, {"weight_loader": weight_loader, "quant_method": by_row})
            layer.register_parameter(name, numbers)
            layer.register_parameter(f"{name}_scale", scales)
        layer.w13_input_scale = layer.w2_input_scale = None  # SGLang's kernels ask for them

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Makes what runs SGLang's kernels, where they run."""
        self._config = moe_runner_config
        if self._kernel is not None:
            self._kernel.create_moe_runner(layer, moe_runner_config)
            self.runner = self._kernel.runner

    def get_triton_quant_info(self, layer: Any) -> Any:
        """Returns SGLang's description of the parameters."""
        assert self._kernel is not None, "there are no kernels on a CPU"
        return self._kernel.get_triton_quant_info(layer)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Returns the weighted sum of what the chosen experts make of every token."""
        if self._kernel is not None:
            return self._kernel.apply(layer, dispatch_output)
        # by name: so that the bridge's hook sees the call
        from sglang.srt.layers.moe import fused_moe_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        plain: Any = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=_Dequantising(layer.w13_weight, layer.w13_weight_scale, x.dtype),
            w2_weight=_Dequantising(layer.w2_weight, layer.w2_weight_scale, x.dtype),
        )
        return StandardCombineInput(
            hidden_states=fused_moe_native.moe_forward_native(plain, x, topk, self._config)
        )


class _Dequantising:
    """Shows experts' matrices as weights, and de-quantises one where it is asked for."""

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self._numbers, self._scales, self._dtype = numbers, scales, dtype
        self.shape = numbers.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return dequantised(self._numbers[expert], self._scales[expert], self._dtype)


def _numbers(*shape: int, of: Format) -> Parameter:
    # a row that nothing ever fills must not be memory that happens to hold something
    data = torch.zeros(shape, dtype=getattr(torch, HELD_AS[of]))
    return Parameter(data, requires_grad=False)


def _scales(*rows: int) -> Parameter:
    return Parameter(torch.zeros(*rows, 1, dtype=torch.float32), requires_grad=False)


def _quantise(
    loaded: torch.Tensor, parameter: Parameter, dtype: torch.dtype, format: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers and scales of a whole matrix, of what a server of `dtype` would hold."""
    matrix = loaded.to(parameter.device, dtype)
    scales = row_scales(row_maxima(matrix), format)
    return quantised(matrix, scales, format), scales


def _linear_kernel(format: Format) -> LinearMethodBase:
    """Return SGLang's own method for the parameters of RowScaledLinear."""
    from sglang.srt.layers.quantization import w8a8_fp8, w8a8_int8

    if format == "int8":
        return w8a8_int8.W8A8Int8LinearMethod(w8a8_int8.W8A8Int8Config())
    return w8a8_fp8.W8A8Fp8LinearMethod(w8a8_fp8.W8A8Fp8Config(is_checkpoint_fp8_serialized=True))


def _experts_kernel(format: Format) -> FusedMoEMethodBase:
    """Return SGLang's own method for the parameters of RowScaledExperts."""
    from sglang.srt.layers.quantization import w8a8_fp8, w8a8_int8

    if format == "int8":
        return w8a8_int8.W8A8Int8MoEMethod(w8a8_int8.W8A8Int8Config())
    return w8a8_fp8.W8A8FP8MoEMethod(w8a8_fp8.W8A8Fp8Config(is_checkpoint_fp8_serialized=True))
