"""What both batteries must do with their mutants: reject every bug that applies, by every check it names, for the right reason."""


def count_rejected(name, subjects, mutants, run):
    """How many of ``mutants`` apply to the first of ``subjects`` that they can break; asserts that each is rejected there."""
    tried = 0
    for mutant in mutants.values():
        subject = next((s for s in subjects if mutant.applies(s)), None)
        if subject is None:
            continue
        tried += 1
        results = [r for r in run(subject.broken_by(mutant.mutate), mutant.caught_by) if r.applies]
        assert results, f"{mutant.name}: none of {mutant.caught_by} applies to {name}"
        for result in results:
            where = f"{name} {dict(result.options or {})}"
            assert not result.passed, f"{mutant.name} ({mutant.words}) passes {result.name} on {where}"
            assert "raises" not in result.reason, f"{mutant.name} was rejected by accident: {result}"
    return tried
