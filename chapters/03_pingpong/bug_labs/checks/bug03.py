from pathlib import Path

from fa3_course.checker import Exercise
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("overlap.py")
overlap = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "overlap")

EXERCISE = Exercise(
    "03.B3",
    "bug03_one_wait.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "Two groups are in flight, QK and then PV. Which one is done after wait_group(1)?",
        "QK is done, PV is not, and still reads the slot of V. The producer fills a slot that is called free: overwrite before free.",
        "Release V behind wait_group(0), K where it is.",
    ),
    faults=(
        (
            "            t.k_empty[slot].arrive(parts.WARPS)\n",
            "            t.k_empty[slot].arrive(parts.WARPS)\n            if i > 0:\n                t.v_empty[last_slot].arrive(parts.WARPS)\n",
        ),
        (
            "            await wg.wait_group(0)\n            t.v_empty[last_slot].arrive(parts.WARPS)\n",
            "            await wg.wait_group(0)\n            if i == len(blocks):\n                t.v_empty[last_slot].arrive(parts.WARPS)\n",
        ),
    ),
)

overlap.register(EXERCISE, "which product still reads the slot?")
