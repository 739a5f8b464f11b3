"""ckptsync inside vLLM (>= 0.26): `register` for every process, `endpoint` for the API server.

`copy_plan` and `readback` know torch only, not vLLM; another engine's plugin can use them as they are.
"""
