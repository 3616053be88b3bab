"""Code with which a team of threads goes through a list of kernels, meeting where one needs what another wrote.

Every kernel's work is cut into items, which any idle thread takes. So a thread that the system suspends, because other
processes work on the same cores, delays the team by the item that it has begun and no more, and not at every kernel.

Nothing here needs llvmlite: the constants of this file are available without it, too.
"""

from __future__ import annotations

__all__ = ["MOST_ITEMS", "RECORD", "RUN", "TABLE", "flags", "team_module"]

RUN = "run"
"""The exported function of a module."""

RECORD = 32
"""Length of a kernel's record in numbers: its address, its flags, and its own fields (`builder.Task`)."""

TABLE = 8
"""Length of the table of a single kernel in numbers: rows, two that are 0, and up to five addresses."""

MOST_ITEMS = 1 << 20
"""Upper bound on items, more than any kernel has."""

_SPINS = 1000
"""Number of polls of a counter before the thread yields to another process: some tens of microseconds."""


def flags(items: int = 1, per_thread: int = 1, meets: bool = False) -> int:
    """Return the flags of a record, which say how its kernel is run.

    Args:
        items: number of items that its work can be cut into.
        per_thread: number of items that there should be for each thread, 1 to 127.
        meets: whether all work so far has to be done before the next kernel begins.
    """
    return min(items, MOST_ITEMS) << 8 | per_thread << 1 | meets


_TEXT = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_num_threads()
declare i32 @sched_yield()
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
DECLARE_PAUSE

define internal void @wait(ptr %done, i64 %wanted) nounwind noinline {
entry:
  br label %look
look:
  %spins = phi i64 [ 0, %entry ], [ %more, %spin ], [ 0, %yield ]
  %now = load atomic i64, ptr %done acquire, align 8
  %ready = icmp sge i64 %now, %wanted
  br i1 %ready, label %end, label %again
again:
  %patient = icmp slt i64 %spins, SPINS
  br i1 %patient, label %spin, label %yield
spin:
  PAUSE
  %more = add i64 %spins, 1
  br label %look
yield:
  %ignored = call i32 @sched_yield()
  br label %look
end:
  ret void
}

define internal void @member(ptr %shared) nounwind {
entry:
  %records = load ptr, ptr %shared
  %count.at = getelementptr i64, ptr %shared, i64 1
  %count = load i64, ptr %count.at
  %table.at = getelementptr i64, ptr %shared, i64 2
  %table = load ptr, ptr %table.at
  %counters.at = getelementptr i64, ptr %shared, i64 3
  %counters = load ptr, ptr %counters.at
  %threads.narrow = call i32 @omp_get_num_threads()
  %threads = sext i32 %threads.narrow to i64
  %alone = icmp eq i64 %threads, 1
  br label %head
head:
  %at = phi i64 [ 0, %entry ], [ %next, %passed ]
  %stage = phi i64 [ 0, %entry ], [ %stage.next, %passed ]
  %before = phi i64 [ 0, %entry ], [ %total.next, %passed ]
  %is.more = icmp slt i64 %at, %count
  br i1 %is.more, label %kernel, label %end
kernel:
  %offset = mul i64 %at, RECORD
  %record = getelementptr i64, ptr %records, i64 %offset
  %code = load ptr, ptr %record
  %flags.at = getelementptr i64, ptr %record, i64 1
  %flags = load i64, ptr %flags.at
  %most = ashr i64 %flags, 8
  %shifted = lshr i64 %flags, 1
  %per = and i64 %shifted, 127
  %wanted = mul i64 %per, %threads
  %fewer = icmp slt i64 %wanted, %most
  %several = select i1 %fewer, i64 %wanted, i64 %most
  %items = select i1 %alone, i64 1, i64 %several
  %total = add i64 %before, %items
  %line = mul i64 %at, 8
  %taken = getelementptr i64, ptr %counters, i64 %line
  %stage.line = mul i64 %stage, 8
  %stage.counters = getelementptr i64, ptr %counters, i64 %stage.line
  %done = getelementptr i64, ptr %stage.counters, i64 1
  br label %take
take:
  %item = atomicrmw add ptr %taken, i64 1 monotonic, align 8
  %is.left = icmp slt i64 %item, %items
  br i1 %is.left, label %work, label %through
work:
  call void %code(ptr %record, ptr %table, i64 %item, i64 %items)
  %ignored = atomicrmw add ptr %done, i64 1 release, align 8
  br label %take
through:
  %meets.bit = and i64 %flags, 1
  %meets = icmp ne i64 %meets.bit, 0
  %next = add i64 %at, 1
  br i1 %meets, label %meet, label %passed
meet:
  call void @wait(ptr %done, i64 %total)
  br label %passed
passed:
  %stage.next = phi i64 [ %stage, %through ], [ %next, %meet ]
  %total.next = phi i64 [ %total, %through ], [ 0, %meet ]
  br label %head
end:
  ret void
}

define void @RUN(ptr %records, i64 %count, ptr %table, i32 %threads) nounwind {
  %words = mul i64 %count, 8
  %bytes = mul i64 %count, 64
  %counters = alloca i64, i64 %words, align 64
  call void @llvm.memset.p0.i64(ptr %counters, i8 0, i64 %bytes, i1 false)
  %shared = alloca i64, i64 4
  store ptr %records, ptr %shared
  %count.at = getelementptr i64, ptr %shared, i64 1
  store i64 %count, ptr %count.at
  %table.at = getelementptr i64, ptr %shared, i64 2
  store ptr %table, ptr %table.at
  %counters.at = getelementptr i64, ptr %shared, i64 3
  store ptr %counters, ptr %counters.at
  call void @GOMP_parallel(ptr @member, ptr %shared, i32 %threads, i32 0)
  ret void
}

define void @once(ptr %record, i64 %rows, ptr %a, ptr %b, ptr %c, ptr %d, i32 %threads) nounwind {
  %table = alloca i64, i64 TABLE
  store i64 %rows, ptr %table
PLACES
  call void @RUN(ptr %record, i64 1, ptr %table, i32 %threads)
  ret void
}
"""


def team_module(pauses: bool) -> str:
    """Return a module of `run(records, count, table, threads)` and `once(record, rows, a, b, c, d, threads)` as text.

    The second makes the table for a single kernel: a to d are its addresses 3 to 6.

    Args:
        pauses: whether the processor has x86's instruction for spinning.
    """
    places = [
        line
        for at, name in enumerate("abcd", start=3)
        for line in (f"  %{name}.at = getelementptr i64, ptr %table, i64 {at}", f"  store ptr %{name}, ptr %{name}.at")
    ]
    words = {
        "DECLARE_PAUSE": "declare void @llvm.x86.sse2.pause()" if pauses else "",
        "PAUSE": "call void @llvm.x86.sse2.pause()" if pauses else "",
        "SPINS": str(_SPINS),
        "RECORD": str(RECORD),
        "PLACES": "\n".join(places),
        "TABLE": str(TABLE),
        "RUN": RUN,
    }
    text = _TEXT
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return text
