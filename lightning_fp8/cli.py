"""The command ``lightning-fp8``: a LightningCLI that finds classes in the working directory and errs in one line.

lightning-fp8 fit --config examples/gpt/fp8.yaml
lightning-fp8 fit --config examples/gpt/fp8.yaml --trainer.plugins.recipe rowwise
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fp8.cli_errors import OneLineParser
from lightning_fp8.precision import TrainerPrecision

#: What a class may raise on a wrong argument; the exceptions of training itself keep their traceback.
USER_ERRORS = (ValueError, TypeError, ImportError, FileNotFoundError, MisconfigurationException)

#: The commands that are none of Lightning's, each a function of its words that returns the exit code.
COMMANDS = {
    "doctor": "lightning_fp8.tuning.commands:doctor",
    "advise": "lightning_fp8.tuning.commands:advise",
    "bench": "lightning_fp8.tuning.commands:bench",
    "inspect": "lightning_fp8.report.inspect:main",
}

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
#: How argparse and jsonargparse (seen with 4.53) answer a command that they do not know, and none at all.
_SUBCOMMAND = re.compile(r'argument subcommand: invalid choice|^expected "subcommand"')


class _Parser(OneLineParser):
    """Names all commands where the first word is none."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and _SUBCOMMAND.search(message):
            message = f"the first word must be one of {', '.join((*_SUBCOMMANDS, *COMMANDS))}: see --help"
        super().error(message, ex)


class FP8CLI(LightningCLI):
    """Any LightningModule and LightningDataModule by class path; says after a fit what ran in FP8, and how."""

    parser: _Parser

    def __init__(self, args: Sequence[str] | None = None) -> None:
        description = (
            "Train, validate, test and predict with Lightning in FP8. Further commands, each with its own --help: "
            f"{', '.join(COMMANDS)}."
        )
        super().__init__(
            parser_class=_Parser,
            parser_kwargs={"prog": "lightning-fp8", "description": description},
            args=None if args is None else list(args),
        )

    def instantiate_classes(self) -> None:
        """Build model, data and trainer; an exception that their constructors raise becomes the one line."""
        try:
            super().instantiate_classes()
        except USER_ERRORS as error:
            self.parser.error(str(error), error)

    def after_fit(self) -> None:
        """Tell what ran in FP8."""
        self._print_summary()

    @rank_zero_only
    def _print_summary(self) -> None:
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, TrainerPrecision):
            return
        if plugin.conversions:
            print(plugin.summary())
        else:
            print("FP8: the model was converted in processes of their own; with strategy=ddp their summary comes here.")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: words after the command's name; ``None`` takes them from ``sys.argv``.

    Returns:
        The exit code. A wrong argument leaves with code 2 through ``SystemExit``, as argparse does.
    """
    # A console script does not have the working directory on its path: a user's own classes are there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    words = sys.argv[1:] if args is None else list(args)
    if words and words[0] in COMMANDS:
        module, function = COMMANDS[words[0]].split(":")
        try:
            code: int = getattr(importlib.import_module(module), function)(words[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # The reader, such as head, has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return code
    FP8CLI(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
