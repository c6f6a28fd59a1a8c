import sys

sys.path.insert(0, "tests")
import test_full_iteration_distributed as t
from distributed import run_distributed

if __name__ == "__main__":
    for inside in (True, False):
        for view in (True, False):
            print(
                run_distributed(
                    t.compare,
                    1,
                    "nccl",
                    arguments=("cuda", 24, inside, {"gradient_as_bucket_view": view}),
                )[0][:1]
            )
    print(run_distributed(t.refuse_settings, 1, "nccl", arguments=("cuda",)))
