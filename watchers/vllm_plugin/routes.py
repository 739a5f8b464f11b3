"""vLLM's own routes for updates, over an engine of this process that has no server."""

from __future__ import annotations

from typing import Any


def own_routes(client: Any) -> Any:
    """An ASGI application: what `VLLM_SERVER_DEV_MODE=1` adds to a server (vLLM 0.32), for an EngineClient."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers

    app = FastAPI()
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    app.state.engine_client, app.state.vllm_config = client, client.vllm_config
    return app
