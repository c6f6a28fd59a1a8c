"""Tables and sentences of the engine's reports, which ``print(graphs.report())`` shows.

Reports are typed as ``Any`` here: their classes print themselves by these functions, and imports
point one way.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_graphs.engine.reasons import BACKWARD, COPIED_GRADIENTS, Reason, reason_for

SCOPE_COLUMNS: Mapping[str, str] = {
    "scope": "the name of the captured part: a module's name, or a layer's name and its stages",
    "graphs": "the number of captured graphs of forwards, of backwards, and of gradients of "
    "weights where these are apart; one of each per call and microbatch in flight",
    "kernels": "the number of kernels in the graphs (on a CPU: of recorded operations); "
    "a replay launches all kernels of a graph at once",
    "static": "memory at fixed addresses, where the graphs read inputs and write outputs",
    "boundary": "the part of the static memory that is handed on as outputs",
    "replays": "the number of forwards that replayed a graph",
    "eager calls": "the number of calls that ran eagerly, by reason; audited ones ran in place "
    "of a replay, to be compared with it",
}
STEP_COLUMNS: Mapping[str, str] = {
    "state": "warmup, captured, capture_failed, differs_from_eager or released",
    "kernels": "the number of kernels in the graph (on a CPU: of recorded operations)",
    "static": "memory at fixed addresses: inputs, outputs and gradients of the graph",
    "pool": "memory that the graph works in (0 on a CPU)",
    "capture": "the time of all captures together",
    "replays": "the number of steps that replayed the graph",
    "eager calls": SCOPE_COLUMNS["eager calls"],
}
_LEFT_ALIGNED = ("scope", "state", "eager calls")


def text_of(report: Any) -> str:
    """Table of a ``Report`` or ``FullIterationReport``, with what is to be known beneath it."""
    table = capture_table(report) if hasattr(report, "scopes") else full_iteration_table(report)
    width = max(80, shutil.get_terminal_size((120, 24)).columns)
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False)
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().rstrip().splitlines()]
    return "\n".join([*lines, *_notes(report)])


def explanation_of(report: Any) -> str:
    """Sentences that explain every column, and every reason that occurs in the report."""
    columns = SCOPE_COLUMNS if hasattr(report, "scopes") else STEP_COLUMNS
    lines = [f"{name}: {meaning}." for name, meaning in columns.items()]
    if report.eager_calls:
        lines += ["", "Reasons for eager calls:"]
    for word in report.eager_calls:
        reason = reason_for(word)
        what = "the backward ran eagerly, since " if word.startswith(BACKWARD) else ""
        lines.append(f"{word}: {what}{_sentences(reason)}")
    copied = list(_copied(report))
    if copied:
        lines += ["", "Reasons for copied gradients (a copy takes memory and a little time):"]
    lines += [f"{word}: {_sentences(COPIED_GRADIENTS[word])}" for word in copied]
    return "\n".join(lines)


def _sentences(reason: Reason) -> str:
    remedy = reason.remedy[0].upper() + reason.remedy[1:]
    return f"{reason.explanation}. {remedy}."


def _notes(report: Any) -> list[str]:
    """Lines beneath the table: what has failed, and each reason with its detail."""
    scopes = getattr(report, "scopes", None)
    named = [("", report)] if scopes is None else [(scope.name, scope) for scope in scopes]
    lines = [] if report.off_because is None else [f"no graphs: {report.off_because}"]
    for name, each in named:
        what = f"{name}: " if name else ""
        if each.refused is not None and each.refused not in each.details.values():
            lines.append(f"{what}not replayed: {each.refused}")
        if each.not_reproducible:
            lines.append(f"{what}eager runs differ from one another, so replays do, too")
        if getattr(each, "interrupted", None):
            lines.append(f"{what}the graph ends early: {each.interrupted}")
    anew = [each.recomputed_bytes for _, each in named if getattr(each, "recomputed_bytes", 0)]
    if anew:
        lines.append(f"{len(anew)} keep inputs only: backwards recompute {format_bytes(sum(anew))}")
    if getattr(report, "shapes", 1) > 1:
        left = f", {report.shapes_left} left since others came more often"
        lines.append(f"graphs of {report.shapes} shapes{left if report.shapes_left else ''}")
    lines += _audits(report)
    lines += _details(named)
    copied = _copied(report)
    if copied:
        lines.append(f"copied gradients of weights: {format_reasons(copied)}")
    return [*lines, "report().explain() explains the columns and the reasons"]


def _audits(report: Any) -> list[str]:
    """Lines about calls that were audited, and about audits that could not be made."""
    lines = []
    if report.audited:
        lines.append(
            f"audits: {report.audited:,} calls ran eagerly in place of a replay, and "
            f"{report.audits_passed:,} of them did what was captured, the last one in step "
            f"{report.last_audited_step}; they took {report.audit_seconds:.2f} s"
        )
    if report.audits_skipped:
        missed = report.audits_missed_bytes
        how_much = f" ({format_bytes(missed)} were missing)" if missed else ""
        skipped = format_reasons(report.audits_skipped)
        lines.append(f"audits that could not be made: {skipped}{how_much}")
    return lines


def _details(named: list[tuple[str, Any]]) -> list[str]:
    """One line for each reason and detail, with the scopes that have it."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for name, each in named:
        for word, count in each.eager_calls.items():
            reason = reason_for(word)
            if word in each.details or reason.remedy != "nothing to do":
                text = each.details.get(word, str(reason))
                found.setdefault((word, text), []).append((name, count))
    lines = []
    for (word, text), scopes in found.items():
        first, more = scopes[0][0], len(scopes) - 1
        where = f" in {first}" if first else ""
        where += f" and {more} more" if more else ""
        lines.append(f"{sum(count for _, count in scopes):,} {word}{where}: {text}")
    return lines


def _copied(report: Any) -> dict[str, int]:
    """Reasons for copied gradients of all scopes; a whole step copies none."""
    copied: dict[str, int] = {}
    for scope in getattr(report, "scopes", ()):
        for word, count in scope.copied_gradients.items():
            copied[word] = copied.get(word, 0) + count
    return copied


def capture_table(report: Any) -> Table:
    """Table with a row per scope of a capture ``Report``, and a caption with the totals."""
    table = Table(title="captured scopes", title_justify="left", caption_justify="left")
    _add_columns(table, SCOPE_COLUMNS)
    for scope in report.scopes:
        table.add_row(
            scope.name,
            "+".join(map(str, _graphs(scope))),
            "?" if scope.kernels is None else f"{scope.kernels:,}",
            format_bytes(scope.static_bytes),
            format_bytes(scope.boundary_bytes),
            f"{scope.replayed:,}",
            format_reasons(_with_audits(scope)),
        )
    table.caption = (
        f"graphs: forward + backward (+ weight gradients); kernels: recorded ops on the CPU; "
        f"captured {report.captured}, for {' + '.join(map(str, report.slots)) or 0} microbatches "
        f"in flight, replayed {report.replayed:,}, pool {format_bytes(report.pool_bytes)} "
        f"(predicted {format_bytes(report.predicted_pool_bytes)}), static "
        f"{format_bytes(report.static_bytes)}; eager calls: {format_reasons(report.eager_calls)}"
    )
    return table


def full_iteration_table(report: Any) -> Table:
    """Table with one row, for the graph of a whole step."""
    table = Table(title="captured step", title_justify="left", caption_justify="left")
    _add_columns(table, STEP_COLUMNS)
    table.add_row(
        report.state,
        "?" if report.kernels is None else f"{report.kernels:,}",
        format_bytes(report.static_bytes),
        format_bytes(report.pool_bytes),
        f"{report.capture_seconds:.2f} s",
        f"{report.replayed:,}",
        format_reasons(_with_audits(report)),
    )
    table.caption = f"kernels: recorded ops on the CPU; captured {report.captures} times"
    return table


def _add_columns(table: Table, columns: Mapping[str, str]) -> None:
    for heading in columns:
        justify: Any = "left" if heading in _LEFT_ALIGNED else "right"
        table.add_column(heading, justify=justify, overflow="fold")


def _with_audits(counted: Any) -> dict[str, int]:
    """Eager calls by reason and audited ones: with the replays these are all calls."""
    return counted.eager_calls | ({"audited": counted.audited} if counted.audited else {})


def _graphs(scope: Any) -> list[int]:
    counts = [scope.forward_graphs, scope.backward_graphs]
    return [*counts, scope.weight_graphs] if scope.weight_graphs else counts


def format_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value, units = float(count), iter("KMGT")
    unit = ""
    while value >= 1024:
        value, unit = value / 1024, next(units)
    return f"{value:,.1f} {unit}iB"


def format_reasons(reasons: Mapping[str, int]) -> str:
    """Write ``{"warm-up": 12}`` as ``12 warm-up``, and no reasons as ``none``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"
