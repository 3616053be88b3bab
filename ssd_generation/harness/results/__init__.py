"""Results that runs store and report: folders, rows and their checks, figures, pages, pictures, token origins."""

from .cells import LEAST_JUDGED, markdown_sentence, markdown_table, sampling_cell
from .checks import Check, string
from .comparison import Comparison, MethodResult
from .environment import commit_of, describe_environment, load_average, own_settings, run_environment
from .figures import engine_efficiency, finished_calls, latest_calls, ratio, ratios_so_far
from .origin_piece import OriginPiece
from .page import markdown, overview, write_summary
from .ratio_plot import COLOURS, MARKERS, new_figure, plot_summary
from .run_folder import PLOT, ROWS, SUMMARY, TABLE, RunFolder, read_rows
from .sentences import conditions, problems, sampling_notes
from .sessions import sessions_of, start_session, take_over_sessions, where_measured
from .stored import check_rows, check_summary
from .summary import categories_of, summarise, summarise_pairs
from .timings import Timing, Timings, spread
from .token_origins import TokenOrigins

__all__ = ["COLOURS", "LEAST_JUDGED", "MARKERS", "PLOT", "ROWS", "SUMMARY", "TABLE", "Check", "Comparison"]
__all__ += ["MethodResult", "OriginPiece", "RunFolder", "Timing", "Timings", "TokenOrigins", "categories_of"]
__all__ += ["check_rows", "check_summary", "commit_of", "conditions", "describe_environment", "engine_efficiency"]
__all__ += ["finished_calls", "latest_calls", "load_average", "markdown", "markdown_sentence", "markdown_table"]
__all__ += ["new_figure", "overview", "own_settings", "plot_summary", "problems", "ratio", "ratios_so_far", "read_rows"]
__all__ += ["run_environment", "sampling_cell", "sampling_notes", "sessions_of", "spread", "start_session", "string"]
__all__ += ["summarise", "summarise_pairs", "take_over_sessions", "where_measured", "write_summary"]
