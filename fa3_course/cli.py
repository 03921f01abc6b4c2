"""The `fa3` command.

Each command lives in its own module and is imported only when it is called: `fa3 --help` stays quick, and a command
whose needs are missing (torch on a workshop laptop, say) does not take the others down with it.
"""

import importlib
import sys

try:
    import typer
except ModuleNotFoundError:
    sys.exit("fa3: the command needs the course's packages: pip install '.[course]' in the clone, or `make demo`")

# name: (module, function, help line)
COMMANDS = {
    "doctor": (
        "fa3_course.commands.doctor",
        "doctor",
        "Check this machine; every red line names the command that mends it.",
    ),
    "demo": ("fa3_course.commands.demo", "demo", "Run every rung that this machine can run, on real activations."),
    "check": ("fa3_course.commands.check", "check", "Check an exercise, by number."),
    "catchup": (
        "fa3_course.commands.check",
        "catchup",
        "Take over the solutions before an exercise, for who comes late.",
    ),
    "reset": ("fa3_course.commands.check", "reset", "Put an exercise's untouched stub back."),
    "sim": ("fa3_course.commands.sim", "sim", "Run a rung on the simulated Hopper SM."),
    "sass": (
        "fa3_course.commands.sass",
        "sass_command",
        "Compile a rung for Hopper and show what is in its machine code.",
    ),
    "ladder": ("fa3_course.commands.ladder", "ladder", "The measured ladder, from the stored rows."),
    "bench": ("fa3_course.commands.bench", "bench", "Measure the rungs and their peers on this machine's Hopper."),
    "bundle": ("fa3_course.commands.bundle", "bundle", "Pack wheels for a machine without a network."),
}

# these take their arguments as they are and return an exit status
PASSED_THROUGH = {"bench"}

app = typer.Typer(
    name="fa3",
    help="FlashAttention-3 for Hopper, rebuilt in Python: the course's command. Each command has its own --help.",
    no_args_is_help=True,
    add_completion=False,
)


def _missing(error: ModuleNotFoundError) -> str:
    """What to say about a module that is not there: the course's own, or a package's."""
    if (error.name or "").partition(".")[0] in ("fa3_course", "fa3_lib", "hopper_sim", "bench"):
        return f"fa3: this version of the course has no module {error.name}"
    return f"fa3: {error.name} is not installed; `fa3 doctor` says what to do"


def _add(name: str, module: str, function: str, help_line: str) -> None:
    """Registers `name` so that its arguments are read by the module's own typer function."""

    def forward(context: typer.Context) -> None:
        call = getattr(importlib.import_module(module), function)
        if name in PASSED_THROUGH:
            raise SystemExit(call(context.args))
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command()(call)
        command(args=context.args, prog_name=f"fa3 {name}")

    app.command(
        name,
        help=help_line,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(forward)


for _name, _entry in COMMANDS.items():
    _add(_name, *_entry)


def main() -> None:
    """Runs the command; a refusal of the course's own (no checkout, a missing package) is one line, not a traceback."""
    from fa3_course.paths import CheckoutMissing

    try:
        app(prog_name="fa3")
    except CheckoutMissing as error:
        sys.exit(f"fa3: {error}")
    except ModuleNotFoundError as error:
        sys.exit(_missing(error))
