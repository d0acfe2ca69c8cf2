"""Operations on trace files: check, audit, merge, prune, pack."""
