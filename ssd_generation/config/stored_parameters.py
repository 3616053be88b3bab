"""Reading and writing a config: dicts, JSON, files, folders and the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..support.display import path_shown
from ..support.hub import locate, upload, write_into
from ..support.messages import did_you_mean, listed, shown
from ..support.parameters import Parameters, pretty_json
from ..support.reading import CONFIG, read_json
from .values import FORMAT, MOST_MODELS

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

CONFIG_NAME = "self_speculative_config.json"
FORMAT_VERSION = 1
SKIP_KEYS = ("attention", "attn", "mlp")
PARTS = ("skip", "drafting", "precision", "lookup", "costs", "provenance", "adapt", "exactness")

# Input of `from_dict` by preset name. SmolLM2's skips only the few attention sub-layers whose absence changes it least.
PUBLISHED: Mapping[str, Any] = read_json(Path(__file__).with_name("presets.json"), CONFIG)

_Stored = TypeVar("_Stored", bound="StoredParameters")


class StoredParameters(Parameters):
    """Parameters stored in a file of their own."""

    @classmethod
    def from_dict(cls: type[_Stored], data: Mapping[str, Any], name: str | None = None) -> _Stored:
        raise NotImplementedError

    def to_json_string(self) -> str:
        """Return the config as JSON, layer lists on one line, with a final newline."""
        return pretty_json(self.to_dict()) + "\n"

    def __repr__(self) -> str:
        return f"{type(self).__name__} {pretty_json(self.to_dict())}"

    @classmethod
    def from_json_file(cls: type[_Stored], path: str | os.PathLike[str], name: str | None = None) -> _Stored:
        """Read a JSON file in any format of `from_dict`; `name` selects one of several configs in it.

        Raises:
            FileNotFoundError: no such file.
            TypeError, ValueError: not a regular file of at most 1 MiB, malformed JSON (the message names file and
                line), an unknown key, or a bad value.
        """
        file = os.path.expanduser(os.fspath(path))
        if os.path.isdir(file):
            raise ValueError(f"{path_shown(file)} is a folder, not a JSON file. Use from_pretrained for folders.")
        data = read_json(file, CONFIG, unique_keys=True)
        try:
            return cls.from_dict(data, name)
        except (TypeError, ValueError) as error:  # the error knows only the dict; the user needs the file's name first
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{path_shown(file)}: {error}") from error

    @classmethod
    def from_pretrained(
        cls: type[_Stored],
        pretrained: str | os.PathLike[str],
        name: str | None = None,
        revision: str | None = None,
        **hub_kwargs: Any,
    ) -> _Stored:
        """Load a config from a folder, a JSON file or the Hub.

        An existing path takes precedence, then a name in `PRESETS`, then the Hub, unless the string looks like a path.

        Args:
            pretrained: a folder that holds `self_speculative_config.json`, a JSON file (any format of `from_dict`), a
                preset's name, or a Hub id.
            name: key of the config to read, where the file holds several.
            revision: branch, tag or commit on the Hub; no effect on local files.
            **hub_kwargs: `token`, `cache_dir`, `local_files_only`, `subfolder`, … for
                `huggingface_hub.hf_hub_download`. `subfolder` works for a local folder too.

        Raises:
            FileNotFoundError: no such file or folder, no config in the folder, or the Hub could not provide one.
            TypeError, ValueError: the file is malformed, or a keyword is unknown.
        """
        path = locate(pretrained, CONFIG_NAME, revision, hub_kwargs, PUBLISHED)
        if path is not None:
            return cls.from_json_file(path, name)
        if name is not None:
            raise ValueError(f"{pretrained!r} is a preset and holds a single config. Leave out name={shown(name)}.")
        return cls.from_dict(PUBLISHED[os.fspath(pretrained)])

    def save_pretrained(
        self, folder: str | os.PathLike[str], push_to_hub: bool = False, repo_id: str | None = None, **push_kwargs: Any
    ) -> Path:
        """Write `self_speculative_config.json` into a folder, whole or not at all, and return the file's path.

        Args:
            folder: folder to write into, created if missing.
            push_to_hub: whether to upload the config as well.
            repo_id: repository to upload to; the folder's name if None.
            **push_kwargs: `private`, `token`, `commit_message`, … for `push_to_hub`.

        Raises:
            ValueError: `folder` is a file or cannot be written to, or arguments for a push are given without one.
        """
        if not push_to_hub and (repo_id is not None or push_kwargs):
            given = [*(["repo_id"] if repo_id is not None else []), *push_kwargs]
            raise ValueError(f"{listed(given)} has an effect only when pushing. Add push_to_hub=True, or leave it out.")
        path = write_into(folder, CONFIG_NAME, self.to_json_string(), "The config")
        if push_to_hub:
            self.push_to_hub(repo_id if repo_id is not None else path.absolute().parent.name, **push_kwargs)
        return path

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload self-speculative decoding config",
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload the config to a model repository on the Hub, created if missing, and return the Hub's answer.

        Args:
            repo_id: repository, such as "user/repo".
            private: whether a new repository is private; None for the account's default.
            token: Hub token; None for the one of `hf auth login`.
            commit_message: message of the commit.
            revision: branch to commit to; None for the main one.
            create_pr: whether to open a pull request instead, as for someone else's model.
        """
        keywords = {"commit_message": commit_message, "revision": revision, "create_pr": create_pr}
        return upload(self.to_json_string(), CONFIG_NAME, repo_id, private, token, **keywords)


def single(data: Any, name: str | None) -> dict[str, Any]:
    """Return the selected config of a dict that may hold several keyed by model name, without its format version."""
    if not isinstance(data, Mapping):
        problem = "A config is a JSON object (a dict), such as {'attention': [3, 5], 'mlp': [6]}"
        raise TypeError(f"{problem}, but got {shown(data)}.")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be the name of a model in the config, but got {shown(name)}.")
    if len(data) > MOST_MODELS:
        raise ValueError(f"A config must have at most {MOST_MODELS:,} entries, but it has more. Leave some out.")
    # A dict of dicts without any of our keys, one of which has a skip set: the last condition prevents a misspelt key,
    # as in {"drafing": {…}} or {"precison": {"mlp": {…}}}, from being read as a model's name.
    several = (
        not data.keys() & {"format_version", *SKIP_KEYS, *PARTS}
        and all(isinstance(entry, Mapping) for entry in data.values())
        and any(
            "skip" in entry or any(key in entry and not isinstance(entry[key], Mapping) for key in SKIP_KEYS)
            for entry in data.values()
        )
    )
    if not several and name is not None:
        raise ValueError(f"This is a single config, not several keyed by model name. Leave out name={shown(name)}.")
    if several:
        if name is None and len(data) > 1:
            raise ValueError(f"There are configs for several models: {listed(data)}. Choose one with name=….")
        if name is not None and name not in data:
            problem = f"There is no config named {shown(name)}; there are {listed(data)}."
            raise ValueError(f"{problem}{did_you_mean(name, data)}")
        data = data[name] if name is not None else next(iter(data.values()))
    version = FORMAT.check("format_version", data.get("format_version", FORMAT_VERSION))
    if version > FORMAT_VERSION:
        problem = f"The config is in format_version {version}, but this ssd_generation reads up to {FORMAT_VERSION}."
        raise ValueError(f"{problem} Update the package, or save the config with the version installed here.")
    return {key: value for key, value in data.items() if key != "format_version"}
