"""Decides every field of Megatron's dataclasses: who sets it, or why YAML may not.

OWNERS: fields that something else sets, by what sets them. REFUSED: fields that would do nothing
here, or harm, by the reason. PASSED: what is handed to Megatron as the user wrote it. A test holds
that each field stands in exactly one of them, so that a new version's fields are decided before it
is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)

Names = Mapping[type, Mapping[str, tuple[str, ...]]]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MODEL = "config.json of the model"
LEARNER = "the learner itself"

OWNERS: Names = {
    TransformerConfig: {
        MODEL: _names("""
            num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size
            normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm
            apply_residual_connection_post_layernorm softmax_scale softmax_type window_size
            window_attn_skip_freq attention_output_gate no_rope_freq rotary_interleaved
            mrope_section multi_latent_attention experimental_attention_variant gated_linear_unit
            activation_func activation_func_clamp_value glu_linear_offset add_bias_linear
            add_qkv_bias num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk
            moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
            moe_router_topk_scaling_factor moe_router_topk_limited_devices
            moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate
            moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size
            linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
            linear_num_value_heads"""),
        "learner.parallel": _names("""
            tensor_model_parallel_size pipeline_model_parallel_size
            virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
            expert_tensor_parallel_size sequence_parallel"""),
        "learner.dtype": _names("params_dtype pipeline_dtype bf16 fp16"),
        "learner.recompute": _names("recompute_granularity moe_layer_recompute"),
        "learner.routing_replay": _names("moe_enable_routing_replay"),
        LEARNER: _names("""
            calculate_per_token_loss variable_seq_lengths perform_initialization
            use_cpu_initialization microbatch_group_size_per_vp_stage mtp_num_layers
            defer_embedding_wgrad_compute moe_hybridep_pad_uneven_dispatch_inputs"""),
    },
    MLATransformerConfig: {
        MODEL: _names("""
            q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
            rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings
            beta_fast beta_slow mscale mscale_all_dim"""),
    },
    DistributedDataParallelConfig: {LEARNER: _names("use_distributed_optimizer")},
    OptimizerConfig: {
        "learner.optimizer.beta1": _names("adam_beta1"),
        "learner.optimizer.beta2": _names("adam_beta2"),
        "learner.optimizer.eps": _names("adam_eps"),
        "learner.dtype": _names("bf16 fp16 params_dtype"),
        "learner.ddp": _names("overlap_param_gather"),
        LEARNER: _names("optimizer use_distributed_optimizer"),
    },
}

GRAPHS = "CUDA graphs need inputs of one shape, and packed micro-batches differ in theirs"
ADAMW = "it is of another optimizer, and the learner's is AdamW"
FSDP = "it is of Megatron-FSDP, and the learner wraps its model in DistributedDataParallel"
CALLABLE = "it holds code, which a file cannot"
QUANTISED = "checkpoints and weight syncs read the weights as plain numbers"

REFUSED: Names = {
    TransformerConfig: {
        CALLABLE: _names("""
            init_method output_layer_init_method embedding_init_method timers
            finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func
            no_sync_func grad_sync_func param_sync_func _cpu_offloading_context
            experimental_attention_variant_loss_scale_func"""),
        "the learner has no process groups for weights that are sharded and gathered again; use "
        "learner.parallel.tp": _names("""
            tensor_parallel_num_weight_shards gtp_weight_remat_size
            expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size"""),
        "it scales weights, logits or attention, so that the checkpoint and SGLang would no longer "
        "mean the same model": _names("""
            use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
            mup_base_head_dim mup_attn_scale_power"""),
        "the learner's attention scales by the head's size alone": _names(
            "apply_query_key_layer_scaling"
        ),
        "the learner builds no multi-token prediction": _names("""
            mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
            mtp_hybrid_override_pattern mtp_standalone"""),
        "it is of sparse attention (DSA), which the learner does not build": _names("""
            dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
            dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
            dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
            dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32"""),
        "it is of Mamba layers, which the learner does not build, or says which layers have linear "
        "attention, as config.json of the model does": _names("""
            linear_attention_freq is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
            mamba_num_heads mamba_training_ssm_states_dtype use_mamba_mem_eff_path"""),
        "it is of layers that differ in kind or size, which the learner does not build": _names(
            "heterogeneous_block_specs hetereogenous_dist_checkpoint"
        ),
        "it is of Megatron's own inference, and SGLang samples here": _names("""
            flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type
            use_inference_optimized_layers inference_fuse_tp_communication
            inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
            inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
            inference_cuda_graph_scope nccl_all_reduce_for_prefill mlp_chunks_for_prefill
            moe_pad_experts_for_cuda_graph_inference"""),
        GRAPHS: _names("""
            enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
            cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_modules
            cuda_graph_scope delay_offload_until_cuda_graph"""),
        "its buffers hold one number of tokens, and packed micro-batches differ": _names("""
            tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
            tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag
            tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
            tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend"""),
        "its schedule cuts sequences by itself; use learner.parallel.cp": _names(
            "hybrid_context_parallel max_seqlen_per_dp_cp_rank"
        ),
        QUANTISED: _names("fp8_param fp4_param"),
        "it computes shared experts in a way that no test here has run": _names(
            "moe_shared_expert_overlap use_grouped_gemm_for_shared_expert"
        ),
        "it drops tokens of a full expert rank, or stops the run": _names("""
            moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_page_size
            moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu"""),
        "it adds random numbers to the routers' logits, for benchmarks": _names(
            "moe_router_force_biased"
        ),
        "it is of quantile balancing, which passes over routing replay and over fillers; use "
        "moe_router_load_balancing_type: aux_loss": _names("moe_router_quantile_balancing_ema"),
        "it reads gate and up projections of experts in another order than checkpoints have": (
            _names("moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size")
        ),
        "experts' weights would get names that checkpoints and weight syncs do not know": _names(
            "moe_single_grouped_weight moe_single_grouped_bias"
        ),
        "Megatron reads it in its own training script alone": _names(
            "use_grouped_gemm_for_dense_mlp"
        ),
        "the learner computes the LM head itself, in learner.dtype": _names("fp8_output_proj"),
        "it has no effect unless moe_token_dispatcher_type is flex, where "
        "moe_flex_dispatcher_num_sms has taken its place": _names(
            "moe_deepep_num_sms moe_hybridep_num_sms"
        ),
        "it tunes HybridEP, which no test here has run": _names("""
            moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute
            moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing"""),
        "NCCL's expert parallelism needs one number of tokens, and packed micro-batches differ; "
        "use moe_token_dispatcher_type: alltoall": _names(
            "moe_ncclep_static_shape moe_ncclep_zero_copy"
        ),
        "its schedule is one that the learner does not drive": _names("""
            overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release
            high_priority_a2a_comm_stream overlap_dispatch_backward_with_experts_wgrad"""),
        "TransformerEngine chooses the kernel, and no test here has run another": _names(
            "flash_attention_version"
        ),
        "it fuses TransformerEngine's layers in a way that no test here has run": _names(
            "fused_residual_rmsnorm use_transformer_engine_op_fuser"
        ),
        "kept buffers must fit every micro-batch, and packed ones differ in size": _names(
            "cpu_offloading_retain_pinned_cpu_buffers"
        ),
        "Megatron plans it in its first pass, which may be one without gradients here; use "
        "learner.recompute": _names("""
            fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
            delta_offload_bytes_across_pp_ranks activation_offload_fraction
            fine_grained_offloading_max_inflight_offloads"""),
        "experts would get no mask of fillers; use learner.recompute: selective, or fewer "
        "learner.max_tokens_per_microbatch": _names("mlp_chunks_for_training"),
    },
    MLATransformerConfig: {
        "it is of Megatron's own inference, and SGLang samples here": _names("cache_mla_latents"),
        "it joins weights under a name that checkpoints and weight syncs do not know": _names(
            "mla_down_proj_fusion"
        ),
    },
    DistributedDataParallelConfig: {
        FSDP: _names("""
            use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy
            suggested_communication_unit_size keep_fp8_transpose_cache fsdp_double_buffer
            fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
            outer_dp_sharding_strategy fsdp_manual_registration megatron_fsdp_main_params_dtype
            megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
            megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
            megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"""),
        "Megatron reads it in its own training script alone; use learner.ddp.bucket_size": _names(
            "num_buckets"
        ),
        QUANTISED: _names("fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag"),
        "the learner forms the process groups of one optimizer": _names(
            "num_distributed_optimizer_instances"
        ),
    },
    OptimizerConfig: {
        CALLABLE: _names("timers"),
        ADAMW: _names("""
            sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode
            muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode
            muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta
            soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method
            adaptive_muon_beta2 adaptive_muon_eps use_layer_wise_distributed_optimizer"""),
        "the learner would report an update that was not made; use learner.optimizer.clip_grad": (
            _names("grad_norm_skip_threshold")
        ),
        GRAPHS: _names("optimizer_cuda_graph"),
        QUANTISED: _names("reuse_grad_buf_for_mxfp8_param_ag"),
    },
}

REMOVED: Mapping[type, Mapping[str, str]] = {
    TransformerConfig: {
        "moe_use_legacy_grouped_gemm": "leave it out: moe_grouped_gemm has one form",
        "moe_extended_tp": "use learner.parallel.etp",
        "async_tensor_model_parallel_allreduce": "leave it out: it is always so",
    },
    DistributedDataParallelConfig: {"preserve_fp32_weights": "leave it out"},
    MLATransformerConfig: {},
    OptimizerConfig: {"muon_use_nesterov": ADAMW},
}
"""What Megatron-Core 0.16 had and 0.19 has not, and what to do instead."""

QUANTILE = "it passes over routing replay and takes fillers for tokens; use aux_loss"
STATIC = "it needs one number of tokens, and packed micro-batches differ; use deepep or hybridep"
FLASH = "it needs flash-attn, which requirements/gpu.lock has not; use fused"
REFUSED_VALUES: Mapping[type, Mapping[str, Mapping[str, str]]] = {
    TransformerConfig: {
        "attention_backend": {"flash": FLASH},
        "moe_router_load_balancing_type": {"quantile_balancing": QUANTILE},
        "moe_flex_dispatcher_backend": {"ncclep": STATIC},
    }
}

PASSED: Mapping[type, tuple[str, ...]] = {
    TransformerConfig: _names("""
        pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes
        deterministic_mode enable_autocast
        autocast_dtype num_microbatches_with_partial_activation_checkpoints
        gradient_accumulation_fusion use_te_rng_tracker cross_entropy_loss_fusion
        cross_entropy_fusion_impl delay_wgrad_compute overlap_p2p_comm batch_p2p_comm
        batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs wgrad_deferral_limit
        overlap_p2p_comm_warmup_flush cpu_offloading cpu_offloading_num_layers
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
        barrier_with_L1_time num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split attention_backend
        hidden_dropout attention_dropout fp32_residual_connection activation_func_fp8_input_store
        qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit test_mode init_method_std
        embedding_init_method_std init_model_with_meta_device attention_softmax_in_fp32
        disable_bf16_reduced_precision_matmul bias_activation_fusion masked_softmax_fusion
        persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion
        use_fused_weighted_squared_relu fused_single_qkv_rope recompute_method recompute_num_layers
        distribute_saved_activations recompute_modules fp8 fp8_recipe
        fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 use_kitchen use_kitchen_attention kitchen_attention_backend fp4
        fp4_recipe fp4_quantizer_factory quant_recipe moe_router_load_balancing_type
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_dtype
        moe_router_force_load_balancing moe_grouped_gemm moe_aux_loss_coeff moe_z_loss_coeff
        moe_input_jitter_eps moe_token_dropping moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_permute_fusion moe_router_fusion
        moe_apply_probs_on_input moe_flex_dispatcher_num_sms cp_comm_type
        clone_scatter_output_in_embedding disable_parameter_transpose_cache config_logger_dir
        batch_invariant_mode use_te_activation_func transformer_impl"""),
    MLATransformerConfig: (),
    DistributedDataParallelConfig: _names("""
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather
        check_for_nan_in_grad check_for_large_grads bucket_size
        pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation
        param_name_patterns_for_fp32_local_accumulation average_in_collective
        gradient_reduce_div_fusion nccl_ub
        disable_symmetric_registration delay_wgrad_compute"""),
    OptimizerConfig: _names("""
        lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm fp8_recipe
        use_precision_aware_optimizer store_param_remainders
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis decoupled_weight_decay
        overlap_param_gather_with_optimizer_step optimizer_cpu_offload optimizer_offload_fraction
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
        pin_cpu_params clip_grad log_num_zeros_in_grad barrier_with_L1_time config_logger_dir"""),
}


def owner_of(target: type, name: str) -> str | None:
    """Return what sets the field `name` of `target`; None: nothing else does."""
    return _key_of(OWNERS, target, name)


def refusal_of(target: type, name: str) -> str | None:
    """Return why YAML may not set the field `name` of `target`; None: it may."""
    return _key_of(REFUSED, target, name)


def value_refusal_of(target: type, name: str, value: object) -> str | None:
    """Return why YAML may not give a field this value, or one of this list; None: it may."""
    tables = (REFUSED_VALUES.get(base, {}) for base in target.__mro__)
    refused = next((table[name] for table in tables if name in table), {})
    given = value if isinstance(value, list) else [value]
    return next((reason for each, reason in refused.items() if each in given), None)


def removal_of(target: type, name: str) -> str | None:
    """Return what to do instead of a field that `target` no longer has; None: it never had it."""
    return next((REMOVED[base][name] for base in _bases(target) if name in REMOVED[base]), None)


def passed(target: type) -> tuple[str, ...]:
    """Return the fields of `target`, its bases' included, that YAML can set."""
    return tuple(name for base in _bases(target) for name in PASSED[base])


def _bases(target: type) -> tuple[type, ...]:
    """Return `target` and what it inherits fields from, as far as the tables hold them."""
    return tuple(base for base in target.__mro__ if base in PASSED)


def _key_of(tables: Names, target: type, name: str) -> str | None:
    found = (table for base in _bases(target) for table in tables.get(base, {}).items())
    return next((key for key, names in found if name in names), None)
