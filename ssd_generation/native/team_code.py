"""Code that lets a team of threads go through a list of kernels, in step where one needs what another wrote."""

from __future__ import annotations

__all__ = ["RECORD", "TABLE", "team_module"]

RECORD = 16
"""Numbers in a kernel's record: its address, whether all threads meet behind it, and its own (`builder.Task`)."""

TABLE = 8
"""Numbers in the table of a single kernel: rows, two that are 0, and up to five addresses."""

_TEAM = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare void @GOMP_barrier()
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()

define internal void @member(ptr %shared) nounwind {
entry:
  %records = load ptr, ptr %shared
  %count.at = getelementptr i64, ptr %shared, i64 1
  %count = load i64, ptr %count.at
  %table.at = getelementptr i64, ptr %shared, i64 2
  %table = load ptr, ptr %table.at
  %thread.narrow = call i32 @omp_get_thread_num()
  %thread = sext i32 %thread.narrow to i64
  %threads.narrow = call i32 @omp_get_num_threads()
  %threads = sext i32 %threads.narrow to i64
  br label %head
head:
  %at = phi i64 [ 0, %entry ], [ %next, %behind ]
  %more = icmp slt i64 %at, %count
  br i1 %more, label %body, label %end
body:
  %offset = mul i64 %at, RECORD
  %record = getelementptr i64, ptr %records, i64 %offset
  %kernel = load ptr, ptr %record
  call void %kernel(ptr %record, ptr %table, i64 %thread, i64 %threads)
  %meets.at = getelementptr i64, ptr %record, i64 1
  %meets = load i64, ptr %meets.at
  %meet = icmp ne i64 %meets, 0
  br i1 %meet, label %barrier, label %behind
barrier:
  call void @GOMP_barrier()
  br label %behind
behind:
  %next = add i64 %at, 1
  br label %head
end:
  ret void
}

define void @run(ptr %records, i64 %count, ptr %table, i32 %threads) nounwind {
  %shared = alloca i64, i64 3
  store ptr %records, ptr %shared
  %count.at = getelementptr i64, ptr %shared, i64 1
  store i64 %count, ptr %count.at
  %table.at = getelementptr i64, ptr %shared, i64 2
  store ptr %table, ptr %table.at
  call void @GOMP_parallel(ptr @member, ptr %shared, i32 %threads, i32 0)
  ret void
}
"""

_ONCE = """
define void @once(ptr %record, i64 %rows, ptr %a, ptr %b, ptr %c, ptr %d, i32 %threads) nounwind {
  %table = alloca i64, i64 TABLE
  store i64 %rows, ptr %table
PLACES
  call void @run(ptr %record, i64 1, ptr %table, i32 %threads)
  ret void
}
"""


def team_module() -> str:
    """The text of a module with `run(records, count, table, threads)` and `once(record, rows, a, b, c, d, threads)`.

    The second makes the table for a single kernel: a to d are its addresses 3 to 6.
    """
    places = [
        line
        for at, name in enumerate("abcd", start=3)
        for line in (f"  %{name}.at = getelementptr i64, ptr %table, i64 {at}", f"  store ptr %{name}, ptr %{name}.at")
    ]
    once = _ONCE.replace("PLACES", "\n".join(places)).replace("TABLE", str(TABLE))
    return _TEAM.replace("RECORD", str(RECORD)) + once
