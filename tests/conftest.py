"""Settings of every test: no network, few threads, the same random numbers every time."""

from __future__ import annotations

import os

# Set before transformers is imported, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # for child processes too

import tempfile

# Measured costs are stored there, never in the user's own cache.
os.environ["SSD_GENERATION_CACHE"] = tempfile.mkdtemp(prefix="ssd_generation_tests_")

import random
import shutil
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

OWN_FOLDERS = [os.environ["SSD_GENERATION_CACHE"]]
# The real model is downloaded and unpacked once for all workers of a run, which inherit the name of its folder. If the
# variable is set beforehand, the model remains there from run to run.
if not os.environ.get("SSD_TESTS_REAL_MODEL"):
    os.environ["SSD_TESTS_REAL_MODEL"] = tempfile.mkdtemp(prefix="ssd_generation_real_model_")
    OWN_FOLDERS.append(os.environ["SSD_TESTS_REAL_MODEL"])
REAL_MODEL = os.environ["SSD_TESTS_REAL_MODEL"]

# Tiny models are slower on two threads than on one, and many times slower alongside other work, as when pytest-xdist
# runs tests in parallel; a real model that runs alone is faster on two.
THREADS = 1
THREADS_OF_SLOW_TESTS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)

# The same examples on every run, and no deadline: a slow first call into torch or a busy machine is not a failure.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the xdist options of pyproject.toml under `-p no:xdist`, where they have no effect."""
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--maxprocesses", "--dist"):
            parser.addoption(option, help="of pytest-xdist, which is not in use")
        parser.addoption("--no-loadscope-reorder", action="store_true", help="of pytest-xdist, which is not in use")


def pytest_unconfigure() -> None:
    for folder in OWN_FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


def _is_slow(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("slow") is not None


# Started first, so that none of them is left to one worker at the end while the others are idle.
LONGEST = (
    "test_pretended_gpu.py",
    "test_smollm2.py",
    "test_recurrent.py",
    "test_notebooks.py",
    "test_evaluation.py",
    "test_families.py",
    "test_models.py",
    "test_search_study.py",
    "test_sampling.py",
    "test_lossless.py",
    "test_cli.py",
    "test_model_check.py",
    "test_tensor_parallel.py",
    "test_hostile.py",
    "test_sandbox.py",
    "test_architecture.py",
    "test_generate.py",
    "test_acceptance.py",
    "test_search_runner.py",
    "test_precision.py",
    "test_same_seed.py",
    "test_exactness.py",
    "test_pictures.py",
    "test_trusted_files.py",
)
# Files of which so many cases of each parametrised test run by default, spread over all of them, the others nightly.
_FEW = 8
SAMPLED: dict[str, int] = {
    **dict.fromkeys(
        (
            "test_adapters.py",
            "test_batch_passes.py",
            "test_capture.py",
            "test_constrained.py",
            "test_exactness.py",
            "test_experts.py",
            "test_experts_copies.py",
            "test_foreign_weights.py",
            "test_latent_attention.py",
            "test_model_check.py",
            "test_native_lists.py",
            "test_offloaded.py",
            "test_opaque_layouts.py",
            "test_prefix_cache.py",
            "test_prefixes_of_states.py",
            "test_prompt_passes.py",
            "test_quantised.py",
            "test_recurrent.py",
            "test_replayed.py",
            "test_same_seed.py",
            "test_states.py",
            "test_weight_changes.py",
        ),
        _FEW,
    ),
    "test_families.py": 5 * _FEW,
}

# The fast subset: all tests of each of these files, or those whose names end in one of the suffixes.
FAST: dict[str, tuple[str, ...]] = {
    "test_acceptance.py": ("[llama]", "[gemma2]", "_accepts"),
    "test_always.py": ("_every_call_drafts", "_stored_with_the_model"),
    "test_bad_input.py": (),
    "test_bounds.py": (),
    "test_config.py": (),
    "test_display.py": (),
    "test_draft_policy_parts.py": (),
    "test_drafting.py": (),
    "test_export.py": ("_drafts", "_refused", "_left", "_card"),
    "test_generate.py": (),
    "test_lookup.py": (),
    "test_lossless.py": ("[llama]", "[gemma2]", "[gpt2]", "_says", "_speed"),
    "test_metrics.py": (),
    "test_precision.py": ("[llama]", "_a_step"),
    "test_prompts.py": (),
    "test_rendering.py": (),
    "test_run_folder.py": ("_appended", "_refused"),
    "test_search_space.py": (),
    "test_skip_mode.py": ("[llama]", "[gemma2]"),
    "test_speedup.py": (),
    "test_statistics.py": (),
    "test_upstream_loop.py": ("[fixed-llama]", "_interface"),
    "test_verification.py": (),
}


def _is_fast_subset(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "fast"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the fast subset, so that they are not even imported for it."""
    if _is_fast_subset(config) and collection_path.name.startswith("test_") and collection_path.name not in FAST:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the fast subset, deselect tests that run on request only, and put the longest files first."""
    for item in items:
        endings = FAST.get(item.path.name)
        if endings is not None and (not endings or item.name.endswith(endings)):
            item.add_marker("fast")
        if item.get_closest_marker("integrations") is not None:
            item.add_marker(pytest.mark.filterwarnings("default"))  # warnings of other programs
    if not (config.getoption("keyword") or any("::" in str(name) for name in config.args)):  # cases that are asked for
        _sample(items)
    for name in ("nightly", "integrations"):
        if name not in (config.getoption("markexpr") or ""):
            left_out = [item for item in items if item.get_closest_marker(name) is not None]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.get_closest_marker(name) is None]
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def _sample(items: list[pytest.Item]) -> None:
    """Mark the cases of `SAMPLED` that do not run by default."""
    cases = defaultdict(list)
    for item in items:
        if item.path.name in SAMPLED and item.get_closest_marker("fast") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for together in cases.values():
        most = SAMPLED[together[0].path.name]
        # Multiples of the golden ratio spread over all combinations of parameters.
        for at in sorted(range(len(together)), key=lambda at: at * 0.6180339887498949 % 1)[most:]:
            together[at].add_marker("nightly")


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> None:
    """Start each test with the same threads and the same random state, whichever tests ran before it."""
    torch.set_num_threads(THREADS_OF_SLOW_TESTS if _is_slow(request) else THREADS)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """Return the folder in which the real model is or will be cached, for tests that are marked `slow`."""
    return Path(REAL_MODEL)


@pytest.fixture(autouse=True)
def known_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured costs by given ones with cheap drafting, so that no decision depends on the clock."""
    if _is_slow(request) or request.node.get_closest_marker("measures") is not None:
        return
    from ssd_generation import Costs
    from ssd_generation.forward.captured import trial
    from ssd_generation.tuning import automatic, call_drafter, costs, exactness

    def costs_of(*args: Any, **kwargs: Any) -> Costs:
        return Costs(plain_step=1.0, draft_step=0.1, verify=[(1, 1.0), (16, 1.1)])

    # Batch invariance is not checked for each of so many models, either.
    untried = exactness.Certificate(None, refusal="not tried in this test")
    monkeypatch.setattr(exactness, "certificate_of", lambda model, again=False: untried)
    monkeypatch.setattr(exactness, "cost_of", lambda model: 1.0)
    monkeypatch.setattr(call_drafter, "costs_of", costs_of)
    monkeypatch.setattr(automatic, "costs_of", costs_of)
    monkeypatch.setattr(costs, "costs_of", costs_of)
    # Tests break passes in ways that no description of them tells.
    for module in (trial, exactness):
        monkeypatch.setattr(module, "cached_measurement", lambda model, described, measure, *_, **__: measure())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the passes of targets and drafts by how they are run."""
    from ssd_generation.forward import draft_passes, runners

    counts = {"captured": 0, "own code": 0, "captured drafts": 0, "drafts by own code": 0}

    def counting(kind: type, method: str, what: str) -> None:
        original = getattr(kind, method)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            counts[what] += found is not None
            return found

        monkeypatch.setattr(kind, method, counted)

    counting(runners.CapturedRunner, "run", "captured")
    counting(runners.EagerRunner, "run", "own code")
    counting(draft_passes._CapturedDraftPasses, "__call__", "captured drafts")
    counting(draft_passes._ModelDraftPasses, "__call__", "drafts by own code")
    return counts


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections beyond this machine, except in tests marked `slow`."""
    if _is_slow(request):
        return

    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        local = not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")
        assert local, f"a test that is not marked slow tried to reach {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip in a child process
