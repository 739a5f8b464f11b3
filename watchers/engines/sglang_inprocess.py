"""An `sglang.Engine` of this process, behind the adapters for servers: SGLang's own routes, called without a socket.

    engine = sglang.Engine(model_path=…)
    watcher = Watcher(root, SglangEngine("http://in-process", transport=InProcess(engine)), stage=…)
    watcher.step()                                   # between two calls of engine.generate

`Engine` itself offers neither a pause nor a label; the routes of its server do. With the plugin in the environment
`SglangTransferEngine` takes the same transport.
"""

from __future__ import annotations

from typing import Any

from ._application import Application


class InProcess(Application):
    """Answers requests from the engine's own application, in the engine's event loop: while that runs nothing, in the
    caller's thread; while it runs, such as under `async_generate`, from any other thread. One engine in a process."""

    def __init__(self, engine: Any) -> None:
        from sglang.srt.entrypoints import http_server
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        tokenizer_manager = engine.tokenizer_manager
        http_server.set_global_state(
            http_server._GlobalState(
                tokenizer_manager=tokenizer_manager,
                template_manager=engine.template_manager,
                scheduler_info=engine._scheduler_init_result.scheduler_infos[0],
            )
        )
        # A server sets it after its warm-up; `/ready` asks for it.
        tokenizer_manager.server_status = ServerStatus.Up
        super().__init__(http_server.app, engine.loop)
