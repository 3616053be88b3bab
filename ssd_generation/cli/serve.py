"""`ssd serve`: transformers' own server, with a model that drafts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from .export import ConfigOption
from .generate import DEFAULT_PROMPT
from .option_groups import with_option_groups
from .options import DEMO

if TYPE_CHECKING:
    from ..serving.server import Drafting

HELP = """Serve a model over HTTP, drafting for every client.

This is transformers' own server (`transformers serve`, extra `serve`): the interface of OpenAI, with streaming and \
tools. Its log says of each request how many tokens it took and how many drafts were accepted. Ctrl-C ends it.

[bold]Examples[/bold]

  ssd serve demo
  ssd serve Qwen/Qwen2.5-0.5B-Instruct --port 8080
  ssd serve ./my-model --config ./search-my-model --dtype bfloat16
"""


@dataclass(frozen=True)
class ServedModelOptions:
    """Config of the served model, its dtype, and its placement."""

    panel: ClassVar[str] = "Model"

    config: ConfigOption = None
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, …")] = "auto"
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads. Default: torch's.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model, where some does.")
    ] = False


@dataclass(frozen=True)
class AddressOptions:
    """Address of the server, and its memory for prefixes."""

    panel: ClassVar[str] = "Server"

    host: Annotated[str, typer.Option(metavar="HOST", help="Address; 0.0.0.0 lets other machines in.")] = "localhost"
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 for any that is free.")] = 8000
    prefix_cache: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory for the caches of requests, which a later one that begins with the same tokens reuses, "
            "such as 500MB; 0 for none.",
        ),
    ] = "1GB"


@with_option_groups
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, or `demo`.")] = DEMO,
    *,
    served: ServedModelOptions,
    address: AddressOptions,
) -> None:
    """Serve a model that drafts."""
    from .console import quiet_libraries

    with _terminated_as_interrupted(), quiet_libraries():
        _serve(model, served, address)


def _serve(model: str, served: ServedModelOptions, address: AddressOptions) -> None:
    from ..generation import bytes_of
    from ..serving.server import ModelServer, free_port, linked_folder, require_packages
    from ..serving.source import check_fits, find_model, require_no_code
    from .console import debugging, err, measuring, progress
    from .export import default_of
    from .resolve_options import set_threads

    # Invalid options are rejected before anything slow begins.
    require_packages()
    kept = bytes_of(address.prefix_cache)
    port = free_port(address.host, address.port)
    source = find_model(model)
    default = default_of(served.config, source.folder)
    check_fits(source.folder, default)
    if not served.trust_remote_code:
        require_no_code(source)
    set_threads(served.threads)
    options: dict[str, Any] = {"host": address.host, "port": port, "dtype": served.dtype, "device": served.device}
    with linked_folder(source, default) as name:
        with progress(f"Loading {name}"):
            server = ModelServer(name, default, **options, log_level="info" if debugging() else "error")
        with measuring():
            drafting = server.prepare(DEFAULT_PROMPT, kept)
        line = f"Serving {name} at http://{_in_url(address.host)}:{port}/v1. {_way(drafting)} Ctrl-C ends it."
        server.run(lambda: err().print(line, style="bold", soft_wrap=True))


def _way(drafting: Drafting) -> str:
    """Describe the way of drafting in a sentence."""
    from .compare_view import drafts_from
    from .generate_run import Draft

    if drafting.refusal is not None:
        return f"Nothing is drafted: {drafting.refusal}."
    return drafts_from(Draft(drafting.config, None, drafting.weight_bytes, drafting.copy_bytes))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM (sent when a container or a service is stopped) end the server as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
