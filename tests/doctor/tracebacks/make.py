"""Make the tracebacks of this folder with the tools that print them so.

python make.py notebook > ipython-9.txt     # IPython 9.18, as Jupyter prints it
python make.py notebook > ipython-7.txt     # IPython 7.34, as Colab prints it
python make.py loguru 2> loguru.txt         # loguru 0.7.3
python make.py group 2> group.txt           # Python 3.11
"""

import sys

import failing


def notebook() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    cell = "import failing\ntry:\n    failing.main()\nexcept RuntimeError as e:\n    raise ValueError('lost') from e"
    InteractiveShell.instance().run_cell(cell)


def loguru() -> None:
    from loguru import logger

    with logger.catch():
        failing.main()


def group() -> None:
    try:
        failing.main()
    except RuntimeError as error:
        raise ExceptionGroup("workers failed", [error, ValueError("lost")]) from None  # noqa: F821


if __name__ == "__main__":
    globals()[sys.argv[1]]()
