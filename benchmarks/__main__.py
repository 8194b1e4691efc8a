"""All benchmarks, one after the other: ``python -m benchmarks``."""

from __future__ import annotations

from benchmarks import bench_identity, bench_inspect, bench_server, bench_store

if __name__ == "__main__":
    for module in (bench_store, bench_server, bench_identity, bench_inspect):
        print(f"== {module.__name__}", flush=True)
        module.main()
