"""The errors that a user can meet, one class per exit code.

Every message is one sentence that says what happened, where (file, tensor,
byte), why, and what to do next. The command line prints the message alone and
ends with `exit_code`; a library caller catches `Gguf2stError`.
"""


class Gguf2stError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class VerificationError(Gguf2stError):
    """The output doesn't hold what it must hold."""

    exit_code = 1


class UsageError(Gguf2stError):
    """The request can't be understood, or contradicts itself."""

    exit_code = 2


class InputError(Gguf2stError):
    """A file can't be read, is damaged, or isn't what it was given as."""

    exit_code = 3


class UnsupportedError(Gguf2stError):
    """The file is sound, but holds something that isn't supported."""

    exit_code = 4


class OutputError(Gguf2stError):
    """The output can't be written: no space, no permission, already there."""

    exit_code = 5
