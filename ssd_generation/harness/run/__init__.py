"""Engine: calls of several methods, interleaved and timed, each alone with the model or in a separate process."""

from .call_memory import peak_bytes
from .calls import Caller, TimedCall
from .child import Child, first_line
from .comparing import COMPARED, compare, methods_of
from .engine import Engine, Item, Observer, Progress
from .interleaving import Turn, interleaved, rotated, timed
from .run_settings import RunSettings, Share
from .side_by_side import SideBySide

__all__ = ["COMPARED", "Caller", "Child", "Engine", "Item", "Observer", "Progress", "RunSettings", "Share"]
__all__ += ["SideBySide", "TimedCall", "Turn", "compare", "first_line", "interleaved", "methods_of"]
__all__ += ["peak_bytes", "rotated", "timed"]
