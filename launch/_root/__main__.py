"""``python -m vcpipe`` is the command line."""

from vcpipe.launch.cli import main

if __name__ == "__main__":
    main()
