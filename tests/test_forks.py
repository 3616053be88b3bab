"""A child forked while another thread drafts finds every lock free and none of that thread's changes in place."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ssd_generation import SkipConfig, enable_self_speculative
from ssd_generation.forward.captured.capture import capture_pass
from ssd_generation.forward.structure.skip_mode import SkipMode
from ssd_generation.models.loading import _quiet_transformers
from ssd_generation.support.forks import ForkSafeRLock, undone_in_child
from tiny_models import prompt, tiny_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def in_child(work: Callable[[], bool], seconds: float = 120.0) -> str:
    """Return the outcome of `work` in a forked child: "True" or "False", an exception's name, or "hangs"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about forking with threads, which is tested here
        read, write = os.pipe()
        pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode()[:500])
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(read, "rb") as file:
        return file.read().decode()


class Held:
    """Context manager during which another thread stays inside `context`."""

    def __init__(self, context: Any) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

        def hold() -> None:
            with context:
                self.entered.set()
                self.leave.wait(60)

        self.thread = threading.Thread(target=hold)

    def __enter__(self) -> None:
        self.thread.start()
        assert self.entered.wait(60)

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join()


def test_lock_is_free_in_the_child() -> None:
    lock = ForkSafeRLock()

    def takes() -> bool:
        with lock:
            return True

    with Held(lock):
        assert in_child(takes) == "True"
    with lock:  # the forking thread holds it, and exists in the child too
        assert in_child(lambda: lock._lock._is_owned()) == "True"  # type: ignore[attr-defined]


def test_what_others_were_to_undo_is_undone() -> None:
    done: list[str] = []
    with Held(undone_in_child(lambda: done.append("other's"))), undone_in_child(lambda: done.append("own")):
        assert in_child(lambda: done == ["other's"]) == "True"
    assert done == []
    assert in_child(lambda: done == []) == "True"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_child_drafts_while_another_thread_was_drafting(family: str) -> None:
    model = enable_self_speculative(tiny_model(family))
    skip, ids = SkipConfig(attention=[1], mlp=[2]), prompt()
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)

    def same() -> bool:
        untouched = not any("forward" in module.__dict__ for module in model.modules())
        again = model.generate(ids, max_new_tokens=12, do_sample=False)
        drafted = model.generate(ids, max_new_tokens=12, do_sample=False, self_speculative=skip)
        return untouched and torch.equal(plain, again) and torch.equal(plain, drafted)

    assert same()
    with Held(SkipMode(model, skip)):
        assert in_child(same) == "True"


def test_child_records_while_another_thread_was_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    inside, leave = threading.Event(), threading.Event()
    embed = type(model.model.layers[0]).forward
    recorder: list[int] = []

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in recorder:
            inside.set()
            leave.wait(60)
        return embed(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", slow)

    def record() -> None:
        recorder.append(threading.get_ident())
        capture_pass(model, 1, 7)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        assert inside.wait(60)
        recorder_of_parent = recorder.copy()

        def works() -> bool:
            from transformers import modeling_utils

            recorder.clear()
            own = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"].__module__.startswith("transformers")
            return own and recorder_of_parent != [] and capture_pass(model, 1, 7) is not None

        assert in_child(works) == "True"
    finally:
        leave.set()
        thread.join()


def test_child_loads_while_another_thread_was_loading() -> None:
    from transformers import modeling_gguf_pytorch_utils as loader

    bar = loader.tqdm

    def loads() -> bool:
        own = loader.tqdm is bar
        with _quiet_transformers():
            return own and loader.tqdm is not bar

    with Held(_quiet_transformers()):
        assert loader.tqdm is not bar
        assert in_child(loads) == "True"


def test_many_children_of_a_process_that_drafts() -> None:
    model = enable_self_speculative(tiny_model("gemma2"))
    skip, ids = SkipConfig(attention=[1], mlp=[2]), prompt()
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    stop = threading.Event()

    def draft() -> None:
        while not stop.is_set():
            model.generate(ids, max_new_tokens=8, do_sample=False, self_speculative=skip)

    def same() -> bool:
        return torch.equal(plain, model.generate(ids, max_new_tokens=8, do_sample=False, self_speculative=skip))

    thread = threading.Thread(target=draft)
    thread.start()
    try:
        assert [in_child(same) for _ in range(12)] == ["True"] * 12
    finally:
        stop.set()
        thread.join()
