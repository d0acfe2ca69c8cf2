"""SQL queries of the tools over a trace, as functions of its reader."""

from ajet_tools.trace.queries.base import episode_of_call as episode_of_call
from ajet_tools.trace.queries.base import find as find
from ajet_tools.trace.queries.base import find_run as find_run
from ajet_tools.trace.queries.episodes import episode_ids as episode_ids
from ajet_tools.trace.queries.runs import failures as failures
from ajet_tools.trace.queries.runs import ledger_totals as ledger_totals
from ajet_tools.trace.queries.runs import metrics as metrics
from ajet_tools.trace.queries.runs import overview as overview
