"""transformers' own server (`transformers serve`) for one model that drafts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers.cli.serve import Serve

from ..config import SelfSpeculativeConfig
from ..forward.copies.low_bit import copy_bytes
from ..generation import PrefixCacheSize, enable_self_speculative, why_no_drafts
from ..harness.texts import encode_prompt
from ..support.display import visible
from ..tuning.automatic import automatic_choice, weight_bytes
from .code import served_code
from .folder import copy_or_link, fill
from .requests import LOG, enable, end_requests
from .source import Source

__all__ = ["Drafting", "ModelServer", "free_port", "linked_folder", "require_packages"]

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic", "starlette", "accelerate")
_WARM_UP = 24  # tokens generated before the first request, so that low-bit copies are built and passes captured
_GRACE = 2  # seconds for streams to end once the server does
_POLL = 0.05  # seconds

Default = SelfSpeculativeConfig | Literal["auto"]


@dataclass(frozen=True)
class Drafting:
    """Drafting of a served model.

    Attributes:
        config: its config.
        weight_bytes: memory of the model's weights.
        copy_bytes: memory of their low-bit copies.
        refusal: reason why this model cannot draft; `None` if it can.
    """

    config: SelfSpeculativeConfig
    weight_bytes: int
    copy_bytes: int
    refusal: str | None


class ModelServer(Serve):
    """transformers' server for one model, which is loaded at construction and served from `run` on.

    Args:
        model: name of the model's folder, relative to the working directory: the model's name for clients.
        default: its drafting config.
        **options: options of `transformers serve`.
    """

    def __init__(self, model: str, default: Default, **options: Any) -> None:
        self._name, self._default = model, default
        super().__init__(force_model=model, trust_remote_code=True, non_blocking=True, **options)

    def start_server(self) -> None:
        """Refuse to load other models from now on; transformers calls this once the model is loaded.

        Otherwise any client could have other models loaded (`/load_model`), and their code would be trusted. Serving
        begins only in `run`, so that the draft is prepared first.
        """
        manager = self._model_manager
        load, key = manager.load_model_and_processor, manager.process_model_name(self._name)

        def load_ours(name: str, *args: Any, **kwargs: Any) -> Any:
            if name != key or kwargs.get("gguf_file") is not None:
                raise ValueError(f"This server is for {self._name} alone.")
            return load(name, *args, **kwargs)

        manager.load_model_and_processor = load_ours

    def prepare(self, text: str, prefix_cache: PrefixCacheSize = False) -> Drafting:
        """Measure the costs of drafting where they are unknown, and generate once, on the thread that serves.

        Args:
            text: prompt to try drafts on.
            prefix_cache: bytes of keys and values retained between requests.
        """
        key = self._model_manager.process_model_name(self._name)
        model, processor = self._model_manager.load_model_and_processor(key)
        manager = self._generation_state.get_manager(key)
        drafting: Drafting = manager.submit(_prepare, model, processor, self._default, text, prefix_cache).result()
        return drafting

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until Ctrl-C, or until the server ends by itself.

        Args:
            ready: callback once requests are answered.

        Raises:
            OSError: the server did not start; its log says why.
        """
        # A request that has not ended by then is cancelled, as if its client had disconnected.
        self.server.config.timeout_graceful_shutdown = _GRACE
        with _warnings_in_the_log():
            super().start_server()
            try:
                self._wait(lambda: self.server.started)
                if not self.server.started:
                    raise OSError("The server did not start; its log, above, says why.")
                ready()
                self._wait(lambda: False)
            except KeyboardInterrupt:
                pass
            finally:
                self._stop()

    def _wait(self, until: Callable[[], bool]) -> None:
        while self._thread.is_alive() and not until():
            time.sleep(_POLL)

    def _stop(self) -> None:
        end_requests()
        self.server.should_exit = True
        self._thread.join()


def _prepare(
    model: Any, processor: Any, default: Default, text: str, prefix_cache: PrefixCacheSize = False
) -> Drafting:
    """Do the work of `ModelServer.prepare`."""
    enable(model, default if isinstance(default, str) else default.to_dict())
    enable_self_speculative(model, prefix_cache=prefix_cache)
    tokenizer = getattr(processor, "tokenizer", processor)
    inputs = {name: ids.to(model.device) for name, ids in encode_prompt(tokenizer, text, True).items()}
    refusal = why_no_drafts(model)
    config = SelfSpeculativeConfig()
    if refusal is None:
        config = (
            default
            if isinstance(default, SelfSpeculativeConfig)
            else automatic_choice(model, inputs["input_ids"]).config
        )
        type(model).generate(model, **inputs, max_new_tokens=_WARM_UP, do_sample=False)
    return Drafting(config, weight_bytes(model), copy_bytes(model) if config.precision else 0, refusal)


@contextlib.contextmanager
def linked_folder(source: Source, default: Default) -> Iterator[str]:
    """Create a folder of links to a model for serving, and make its parent the working directory meanwhile.

    transformers' server names a model by its path. A path relative to the working directory is the model's own name, so
    that clients need not know where it is stored.

    Args:
        source: the model.
        default: its drafting config.

    Yields:
        The relative path.
    """
    name = "".join(c if c.isalnum() or c in "-._/" else "-" for c in source.name)
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="ssd-serve-") as parent:
        folder = Path(parent) / name
        folder.mkdir(parents=True)
        copy_or_link(source.folder, folder, link=True)
        fill(folder, default, served_code(default))
        os.chdir(parent)
        try:
            yield name
        finally:
            os.chdir(before)


def require_packages() -> None:
    """Raise `ImportError` if a package that transformers' server needs is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"transformers' server needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            'installed: pip install "ssd_generation[serve]" (extra `serve`).'
        )


def free_port(host: str, port: int) -> int:
    """Check that a server can listen on a port, before a model is loaded for it.

    Args:
        host: the address.
        port: the port; 0 for any that is free.

    Returns:
        The port.

    Raises:
        ValueError: the port is taken, or this machine has no such address.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                if os.name == "posix":  # like the server: a port whose last connections are still closing is free
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((address[0], port, *address[2:]))
                port = port or tried.getsockname()[1]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {host} --port {port}: no server can listen there ({reason}). Choose another."
        ) from error
    return port


@contextlib.contextmanager
def _warnings_in_the_log() -> Iterator[None]:
    """Log warnings that concern the user, one line each; suppress those that concern developers."""

    def log(message: Warning | str, *_: Any, **__: Any) -> None:
        LOG.warning(visible(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = log
        yield
