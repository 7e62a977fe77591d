"""What is refused of teachers, and how it is mended: settings, words of the line, a mend."""

TEACHER_REFUSED: list[tuple[list[str], list[str], list[str]]] = [
    (["teacher=null"], ["missing key 'teacher'", "reverse_kl"], ["teacher={model: there}"]),
    (
        ["teachers={teacher: {model: there}}", "data.teacher_key=who"],
        ["teachers", "'teacher'"],
        ["teachers={other: {model: there}}"],
    ),
    (
        ["teachers={maths: {model: there}}"],
        ["data.teacher_key", "teachers", "null"],
        ["data.teacher_key=who"],
    ),
    (
        ["teachers={maths: {model: there}}", "scoring.mixture={maths: 1.0}"],
        ["scoring.mixture", "none for teacher"],
        ["scoring.mixture={maths: 0.5, teacher: 0.5}"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=2", "data.teacher_prompt_key=hint"],
        ["data.teacher_prompt_key hint", "grpo", "leave it null"],
        ["data.teacher_prompt_key=null"],
    ),
    (
        ["data.without_teacher_prompt=skip"],
        ["without_teacher_prompt needs teacher_prompt_key", "skip", "leave this out"],
        ["data.teacher_prompt_key=hint"],
    ),
    (
        ["metrics.leak_every=5"],
        ["metrics.leak_every needs data.teacher_prompt_key", "got 5", "leave this out"],
        ["data.teacher_prompt_key=hint"],
    ),
    (
        [
            "metrics.leak_every=5",
            "data.teacher_prompt_key=hint",
            "objective={type: sft_on_teacher}",
        ],
        ["metrics.leak_every must be 0 with objective.type sft_on_teacher", "got 5"],
        ["metrics.leak_every=0"],
    ),
    (
        ["metrics.leak_every=5", "data.teacher_prompt_key=hint", "teacher.chat_template=true"],
        ["metrics.leak_every must be 0 with teacher.", "got 5", "leave one of them out"],
        ["metrics.leak_every=0"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=2", "teacher.chat_template=true"],
        ["teacher.chat_template", "grpo", "True", "leave it null"],
        ["teacher.chat_template=null"],
    ),
    (
        [
            "environment={type: guess, history: branch}",
            "data.chat_template=true",
            "teacher.system_prompt=Add.",
        ],
        ["teacher.system_prompt", "environment.history branch", "Add.", "leave one of them out"],
        ["environment.history=append"],
    ),
    (
        ["teacher.chat_template=true", "scoring.mixture={teacher: 1.0}"],
        ["teacher.chat_template must be null with scoring.mixture", "leave one of them out"],
        ["teacher.chat_template=null"],
    ),
    (
        ["teacher.chat_template=false", "teacher.system_prompt=Add."],
        ["teacher.system_prompt needs teacher.chat_template", "Add.", "leave it out"],
        ["teacher.chat_template=true"],
    ),
    (
        ["environment={type: guess}", "data.chat_template=true", "data.teacher_prompt_key=hint"],
        ["data.teacher_prompt_key", "environment", "hint", "leave one of them out"],
        ["data.teacher_prompt_key=null"],
    ),
    (
        ["objective.type=grpo", "rollout.group_size=2", "data.teacher_key=who"],
        ["data.teacher_key who", "grpo", "leave it null"],
        ["data.teacher_key=null"],
    ),
    (
        [
            "objective.type=grpo",
            "rollout.group_size=2",
            "data.teacher_key=who",
            "teachers={maths: {model: there}}",
        ],
        ["teachers has no effect", "grpo"],
        ["teachers={}", "data.teacher_key=null"],
    ),
]
