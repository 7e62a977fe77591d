"""Lists the options of SGLang: which a user of a run may set, and why not the others.

A run trains on what its servers sample and score, so that what changes their model, tokens,
sampling or layout is refused unless a key of the run decides it. test_option_rules.py holds the
tables to the installed SGLang: an option that none of them names fails it.
"""

from __future__ import annotations

from collections.abc import Mapping


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Turn {reason: names} into {name: reason}."""
    found = [(name, reason) for reason, names in groups.items() for name in names.split()]
    assert len(dict(found)) == len(found), "an option is named twice"
    return dict(found)


# Option -> what to use instead; {role} is the section.
DECIDED = _by_name(
    {
        "{role}.model": "model_path",
        "{role}.model, whose tokenizer is used": "tokenizer_path",
        "{role}.host": "host",
        "{role}.base_port": "port",
        "{role}.dtype": "dtype",
        "{role}.tp": "tp_size",
        "{role}.tp, because a server gets one GPU for each of its tp ranks": "pp_size",
        "{role}.gpus": "base_gpu_id gpu_id_step device",
        "{role}.ep": "ep_size",
        "{role}.context_length": "context_length",
        "{role}.max_total_tokens": "max_total_tokens",
        "{role}.max_running_requests": "max_running_requests",
        "{role}.mem_fraction_static": "mem_fraction_static",
        "run.seed": "random_seed",
        "run.max_steps, which are counted as versions": "weight_version",
        "learner.routing_replay: rollout": "enable_return_routed_experts",
        "run.deterministic": "enable_deterministic_inference",
        "{role}.api_key_env: a key in a config would be in files and logs": "api_key admin_api_key",
        "{role}.extra_args itself, one list item per argument": "config",
        "schedule.time_shared": "enable_memory_saver enable_weights_cpu_backup",
    }
)

STUDENTS = _by_name(
    {
        "a weight sync could not write the weights that it moves": (
            "cpu_offload_gb offload_group_size offload_mode offload_num_in_group "
            "offload_prefetch_step enable_eplb eplb_algorithm "
            "eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk "
            "eplb_rebalance_num_iterations init_expert_location ep_num_redundant_experts "
            "ep_dispatch_algorithm elastic_ep_backend elastic_ep_initial_size "
            "elastic_ep_scale_timeout enable_elastic_expert_backup ep_join_mode "
            "ep_join_rank_offset max_ep_size enable_paged_experts paged_experts_num_resident "
            "mooncake_ib_device"
        ),
        "its NCCL would share memory (NCCL_CUMEM_ENABLE=1) as that of the learner, which is in one "
        "group with it, does not": "enable_symm_mem enable_kv_cache_sharding",
        "it rounds what travels between experts, to 8 bits by default, and sets student.ep": (
            "moe_a2a_backend flashinfer_a2a_dispatch_type deepep_config deepep_mode deepep_v2_mode"
        ),
    }
)
"""Why students may not have what teachers may."""

EVERYBODY = _by_name(
    {
        "it changes the model that is served, which config.json and {role}.model alone may do": (
            "json_model_override_args load_format model_loader_extra_config model_impl "
            "model_config_parser trust_remote_code revision is_embedding enable_multimodal "
            "download_dir decrypted_config_file decrypted_draft_config_file "
            "delete_ckpt_after_loading startup_weight_load_mode "
            "checkpoint_engine_wait_weights_before_ready modelexpress_config custom_weight_loader "
            "weight_cache_mode weight_cache_socket weight_cache_timeout "
            "remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip "
            "remote_instance_weight_loader_seed_instance_service_port "
            "remote_instance_weight_loader_send_weights_group_ports "
            "remote_instance_weight_loader_start_seed_via_transfer_engine "
            "engine_info_bootstrap_port forward_hooks language_model_only language_only "
            "encoder_only kt_cpuinfer kt_max_deferred_experts_per_token kt_method "
            "kt_num_gpu_experts kt_threadpool_count kt_weight_path ple_offload_backend "
            "ple_offload_dir ple_offload_embedding debug_tensor_dump_input_file"
        ),
        "it rounds weights, keys, values or logits behind the learner's back; use {role}.dtype or "
        "{role}.quantization": (
            "kv_cache_dtype quantization_param_path quantize_and_serve modelopt_quant "
            "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path "
            "rl_on_policy_target rl_quant_profile enable_tf32_matmul enable_quant_communications "
            "prefill_kv_cache_dequant_dtype flashinfer_mxfp4_moe_precision "
            "deepep_dispatcher_output_dtype enable_w4a4_mxfp4_megamoe qsa_indexer_dtype "
            "disable_flashinfer_cutlass_moe_fp4_allgather"
        ),
        "adapters are no part of {role}.model; merge them into it": (
            "enable_lora enable_lora_overlap_loading lora_backend lora_drain_wait_threshold "
            "lora_eviction_policy lora_paths lora_strict_loading lora_target_modules "
            "lora_use_virtual_experts max_loaded_loras max_lora_chunk_size max_lora_rank "
            "max_loras_per_batch experts_shared_outer_loras uno_lora_path"
        ),
        "tokens must be drawn from the model's own distribution, one at a time": (
            "speculative_accept_threshold_acc speculative_accept_threshold_single "
            "speculative_adaptive speculative_adaptive_config speculative_algorithm "
            "speculative_attention_mode speculative_dflash_block_size "
            "speculative_domino_candidate_pool_size speculative_draft_attention_backend "
            "speculative_draft_kv_cache_dtype speculative_draft_load_format "
            "speculative_draft_model_path speculative_draft_model_quantization "
            "speculative_draft_model_revision speculative_draft_sink_size "
            "speculative_draft_window_size speculative_dsa_topk_backend "
            "speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size "
            "speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path "
            "speculative_eagle_topk speculative_enable_w4a4_mxfp4_megamoe "
            "speculative_moe_a2a_backend speculative_moe_runner_backend speculative_ngram_capacity "
            "speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path "
            "speculative_ngram_external_sam_budget speculative_ngram_match_type "
            "speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth "
            "speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps "
            "speculative_token_map speculative_use_block_verification "
            "speculative_use_rejection_sampling spec_trace_dir decoupled_spec_bind_endpoint "
            "decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role "
            "enable_multi_layer_eagle enable_draft_weights_cpu_backup dllm_algorithm "
            "dllm_algorithm_config dllm_fdfo enable_linear_replayssm_spec "
            "preferred_sampling_params sampling_defaults enable_custom_logit_processor "
            "enable_watermark watermark_config enable_strict_thinking strip_thinking_cache "
            "sampling_mask_max_tokens mlx_enable_sampling"
        ),
        "it changes text or tokens, which {role}.model's tokenizer and the keys of data decide": (
            "tokenizer_mode tokenizer_backend chat_template hf_chat_template_name "
            "completion_template default_chat_template_kwargs trust_request_chat_template "
            "reasoning_parser tool_call_parser tool_server allow_auto_truncate grammar_backend "
            "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt "
            "constrained_json_whitespace_pattern disable_outlines_disk_cache"
        ),
        "a run's servers are laid out by {role}.servers, {role}.tp and {role}.ep": (
            "dp_size attn_dp_size attn_cp_size dcp_size dcp_comm_backend dcp_replicate_q_proj "
            "dwdp_size cp_strategy enable_prefill_cp enable_cp_decode_attn_tp enable_dp_attention "
            "enable_dp_attention_local_control_broadcast enable_dp_lm_head "
            "enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size "
            "moe_dense_tp_size moe_dp_size enable_tp_lm_head_all_to_all "
            "enable_attn_tp_input_scattered disable_attn_tp_gather enable_layernorm_sp "
            "enable_megamoe_for_layernorm_sp boundary_reduction load_balance_method nnodes "
            "node_rank dist_init_addr use_ray gated_launch_port pp_async_batch_depth "
            "pp_max_micro_batch_size enable_two_batch_overlap enable_single_batch_overlap "
            "tbo_token_distribution_threshold enable_pdmux "
            "pdmux_config_path sm_group_num optimistic_prefill_attempts "
            "disaggregation_bootstrap_port disaggregation_decode_allocation_policy "
            "disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache "
            "disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold "
            "disaggregation_decode_polling_interval disaggregation_decode_retraction_backup "
            "disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode "
            "disaggregation_transfer_backend enable_pd_role_switch num_reserved_decode_tokens "
            "encoder_bootstrap_port encoder_register_urls encoder_transfer_backend encoder_urls "
            "enable_adaptive_dispatch_to_encoder"
        ),
        "it keeps keys and values of older weights where no weight sync removes them": (
            "enable_hierarchical_cache hicache_host_memory_fraction hicache_host_memory_mode "
            "hicache_io_backend hicache_mem_layout hicache_ratio hicache_size "
            "hicache_storage_backend hicache_storage_backend_extra_config "
            "hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts "
            "hicache_storage_prefetch_retry_poll_interval hicache_write_policy enable_lmcache "
            "lmcache_config_file enable_flexkv flexkv_config_file "
            "enable_unified_cache_external_linker unified_cache_external_linker_backend "
            "unified_cache_external_linker_config enable_linker_mla_dedup radix_cache_backend "
            "enable_session_radix_cache enable_streaming_session enable_response_store "
            "file_storage_path prefill_only_disable_kv_cache kv_events_config"
        ),
        "the run's own client speaks plain HTTP to the server that it started": (
            "ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password enable_ssl_refresh "
            "grpc_mode grpc_port grpc_response_timeout_secs smg_grpc_mode smg_http_sidecar_port "
            "sidecar sidecar_args enable_http2 http2_initial_connection_window_size "
            "http2_max_concurrent_streams enable_http_worker_reuseport fastapi_root_path "
            "served_model_name load_publish_endpoint load_snapshot_publish_interval "
            "incremental_streaming_output enable_mis return_input_ids return_output_ids "
            "tokenizer_worker_num detokenizer_worker_num"
        ),
        "it lets a server turn requests away or end them, which a run neither expects nor counts": (
            "max_queued_requests enable_priority_scheduling abort_on_priority_when_disabled "
            "default_priority_value disable_priority_preemption "
            "priority_scheduling_preemption_threshold schedule_low_priority_values_first"
        ),
        "no model or request of a run has what it is for": (
            "allowed_media_domains asr_max_buffer_seconds asr_max_concurrent_sessions "
            "disable_fast_image_processor image_processor_backend limit_mm_data_per_request "
            "media_url_max_file_size_mb mm_attention_backend mm_enable_dp_encoder "
            "mm_feature_transport mm_global_cache_backend mm_io_worker_num "
            "mm_preprocess_cache_size_mb mm_process_config mm_processor_worker_num "
            "enable_broadcast_mm_inputs_process enable_mm_global_cache enable_prefix_mm_cache "
            "enable_precise_embedding_interpolation trust_mm_content_hashes "
            "enable_return_aux_hidden_states enable_return_hidden_states "
            "enable_return_indexer_topk return_aux_hidden_state_layer_ids "
            "return_hidden_states_mode mamba_backend mamba_cache_philox_rounds "
            "mamba_full_memory_ratio mamba_max_states_per_path mamba_radix_cache_strategy "
            "mamba_ssm_dtype mamba_track_interval max_mamba_cache_size "
            "enable_int8_mamba_checkpoint int8_mamba_ckpt_size "
            "enable_mamba_cache_stochastic_rounding enable_linear_replayssm "
            "linear_replayssm_cache_len linear_attn_backend linear_attn_decode_backend "
            "linear_attn_prefill_backend linear_attn_verify_backend enable_scattered_sconv "
            "c128_page_size dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend "
            "dsa_topk_backend dsa_triton_union dsv4_attn_backend dsv4_prefill_backend "
            "enable_deepseek_v4_fp4_indexer enable_dsa_cache_layer_split enable_dsa_fused_indexer "
            "enable_hisparse hisparse_config swa_full_tokens_ratio swa_prefix_tails "
            "disable_hybrid_swa_memory enable_decoder_swa_bounded_replay "
            "enable_encoder_swa_bounded_replay enable_unified_memory enable_page_major_kv_layout "
            "disable_shared_experts_fusion enforce_shared_experts_fusion enable_waterfill "
            "enable_nvidia_megakernel enable_amd_monokernel fuseep_mode"
        ),
    }
)

ALLOWED = _by_name(
    {
        "kernels": (
            "attention_backend decode_attention_backend prefill_attention_backend sampling_backend "
            "bf16_gemm_backend fp8_gemm_runner_backend fp4_gemm_runner_backend moe_runner_backend "
            "enable_lean_attention triton_attention_num_kv_splits triton_attention_reduce_in_fp32 "
            "triton_attention_split_tile_size flashinfer_mla_disable_ragged "
            "disable_flashinfer_autotune flashinfer_autotune_skip_ops "
            "enable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend "
            "enforce_disable_flashinfer_allreduce_fusion enable_aiter_allreduce_fusion "
            "disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill "
            "disable_custom_all_reduce enable_mscclpp enable_nccl_nvls "
            "enable_torch_symm_mem enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope "
            "enable_fp32_lm_head enable_torch_compile enable_torch_compile_debug_mode "
            "torch_compile_max_bs"
        ),
        "CUDA graphs": (
            "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode "
            "cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode "
            "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
            "cuda_graph_prefill_max_context debug_cuda_graph disable_cuda_graph "
            "disable_cuda_graph_padding disable_decode_cuda_graph disable_prefill_cuda_graph "
            "enable_cudagraph_gc enable_profile_cuda_graph"
        ),
        "what is computed when": (
            "chunked_prefill_size max_prefill_tokens prefill_max_requests schedule_policy "
            "schedule_conservativeness page_size disable_radix_cache disable_chunked_prefix_cache "
            "radix_eviction_policy radix_eviction_policy_config disable_overlap_schedule "
            "enable_mixed_chunk enable_dynamic_chunking num_continuous_decode_steps "
            "scheduler_recv_interval stream_interval batch_notify_size enable_prefill_delayer "
            "prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes "
            "prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark "
            "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets "
            "prefill_decode_interval prefill_decode_interval_min_bs min_free_slots_delay "
            "retraction_policy sleep_on_idle enable_dynamic_batch_tokenizer "
            "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
            "enable_tokenizer_batch_encode disable_tokenizer_batch_decode skip_tokenizer_init"
        ),
        "how files are read, processes placed and watched": (
            "weight_loader_disable_mmap weight_loader_drop_cache_after_load "
            "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads model_checksum "
            "numa_node nccl_port pre_warm_nccl enable_p2p_check dist_timeout watchdog_timeout "
            "soft_watchdog_timeout skip_server_warmup warmups gc_threshold "
            "gc_warning_threshold_secs"
        ),
        "what is logged and measured": (
            "log_level log_level_http log_requests log_requests_format log_requests_level "
            "log_requests_target uvicorn_access_log_exclude_prefixes decode_log_interval "
            "show_time_cost crash_dump_folder enable_cache_report enable_metrics "
            "enable_metrics_for_all_schedulers enable_mfu_metrics "
            "enable_request_time_stats_logging enable_forward_pass_metrics "
            "forward_pass_metrics_ipc_name forward_pass_metrics_worker_id extra_metric_labels "
            "export_metrics_to_file export_metrics_to_file_dir "
            "tokenizer_metrics_allowed_custom_labels tokenizer_metrics_custom_labels_header "
            "bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token "
            "generation_tokens_buckets prompt_tokens_buckets stream_response_default_include_usage "
            "enable_layerwise_nvtx_marker enable_trace trace_modules otlp_service_name "
            "otlp_traces_endpoint expert_balancedness_report_mode "
            "expert_distribution_recorder_buffer_size expert_distribution_recorder_mode kv_canary "
            "kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_layers "
            "debug_tensor_dump_output_folder msprobe_dump_config"
        ),
    }
)
WITHOUT_OPTION = frozenset(
    [
        "_radix_eviction_policy_explicitly_set",
        "_speculative_draft_quantization_explicitly_set",
        "_swa_full_tokens_ratio_explicitly_set",
        "aux_hidden_state_capture",
        "custom_sigquit_handler",
        "enable_cp_tp_group_sharing",
        "grpc_worker_threads",
        "speculative_boundary_reduction",
        "stat_loggers",
        "uses_mamba_radix_cache",
        "watermark_context_window",
        "watermark_default_enabled",
        "watermark_enforce_all",
        "watermark_key",
        "watermark_key_b",
        "watermark_max_probability",
        "watermark_mixing_probability",
    ]
)
"""Fields of SGLang's ServerArgs that its command line cannot set."""
TEACHERS = frozenset({"quantization"})
"""A teacher's server may hold its matrices in any format of SGLang; a student's may not."""


def why_refused(setting: str, role: str, *, follows: bool = False) -> str | None:
    """Return why the server of a role may not be given an option; None: it may.

    setting: the option's name in SGLang. role: the section of the configuration.
    follows: it is a teacher that is sent weights, as a student is.
    """
    student = role == "student" or follows
    if setting in DECIDED:
        return "use " + DECIDED[setting].format(role=role)
    if setting in EVERYBODY:
        return EVERYBODY[setting].format(role=role)
    if setting in STUDENTS:
        return STUDENTS[setting] if student else None
    if setting in TEACHERS:
        return f"use {role}.quantization" if student else None
    return None if setting in ALLOWED else "it is not known to leave the served model as it is"
