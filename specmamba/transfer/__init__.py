"""Prefill and decode apart: prompts that one server has computed go to another one, as entries of the prefix cache."""
