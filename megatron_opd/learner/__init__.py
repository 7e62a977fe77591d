"""The Megatron-Core learner."""
