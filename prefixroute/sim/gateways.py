"""To come."""
import argparse
def add_options(parser: argparse.ArgumentParser) -> None:
    """None yet."""
def run_options(options: argparse.Namespace) -> int:
    """None yet."""
    return 0
