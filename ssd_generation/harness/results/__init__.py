"""Results that runs store and report: folders, rows and their checks, figures, pages, plots, token origins."""

from .acceptance_length import ALL, acceptance_lengths, length_cells, length_table
from .cells import LEAST_JUDGED, markdown_sentence, markdown_table, sampling_cell
from .checks import Check, string
from .comparison import Comparison, MethodResult
from .environment import commit_of, describe_environment, load_average, own_settings, run_environment
from .figures import engine_efficiency, finished_calls, latest_calls, ratio, ratios_so_far
from .origin_piece import DECIDED, DRAFTED, LOOKED_UP, OriginPiece
from .page import markdown, overview, write_summary
from .piece_reader import Piece, PieceReader
from .ratio_plot import COLOURS, MARKERS, new_figure, plot_summary
from .run_folder import PLOT, ROWS, SUMMARY, TABLE, RunFolder, read_rows
from .sentences import conditions, problems, sampling_notes
from .sessions import sessions_of, start_session, take_over_sessions, where_measured
from .stored import check_rows, check_summary
from .summary import categories_of, summarise, summarise_pairs
from .timings import Timing, Timings, spread
from .token_origins import STYLES, TokenOrigins, legend

__all__ = ["ALL", "COLOURS", "DECIDED", "DRAFTED", "LEAST_JUDGED", "LOOKED_UP", "MARKERS", "PLOT", "ROWS"]
__all__ += ["STYLES", "SUMMARY", "TABLE", "Check", "Comparison", "MethodResult", "OriginPiece", "Piece"]
__all__ += ["PieceReader", "RunFolder", "Timing", "Timings", "TokenOrigins", "acceptance_lengths", "categories_of"]
__all__ += ["check_rows", "check_summary", "commit_of", "conditions", "describe_environment", "engine_efficiency"]
__all__ += ["finished_calls", "latest_calls", "legend", "length_cells", "length_table", "load_average", "markdown"]
__all__ += ["markdown_sentence", "markdown_table", "new_figure", "overview", "own_settings", "plot_summary"]
__all__ += ["problems", "ratio", "ratios_so_far", "read_rows", "run_environment", "sampling_cell"]
__all__ += ["sampling_notes", "sessions_of", "spread", "start_session", "string", "summarise", "summarise_pairs"]
__all__ += ["take_over_sessions", "where_measured", "write_summary"]
