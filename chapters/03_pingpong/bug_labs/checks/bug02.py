from pathlib import Path

from fa3_course.checker import Exercise
from fa3_course.checker.catalogue import load_source

HELPER = Path(__file__).with_name("overlap.py")
overlap = load_source(HELPER.read_text(encoding="utf-8"), HELPER, "overlap")

EXERCISE = Exercise(
    "03.B2",
    "bug02_weights_too_soon.py",
    functions={"verdict": 1, "consumer": 0},
    hints=(
        "PV of the block before is in flight during softmax. Where does it read its weights from?",
        "A WGMMA reads its operand in registers as long as it runs. Writing P before PV is done is: operand touched in flight.",
        "Move tOrP.write(weights) behind wait_group(0), beside the rescale of O.",
    ),
    faults=(
        (
            "            weights, shrink = await rows.step(acc_S.read(), blocks[i])\n",
            "            weights, shrink = await rows.step(acc_S.read(), blocks[i])\n            tOrP.write(weights)\n",
        ),
        ("            tOrP.write(weights)\n            await parts.rescale", "            await parts.rescale"),
    ),
)

overlap.register(EXERCISE, "who may still read P?")
