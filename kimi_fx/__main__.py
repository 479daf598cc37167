"""`python -m kimi_fx`: the command line, as `kimi-fx`."""

from .cli import main

raise SystemExit(main())
