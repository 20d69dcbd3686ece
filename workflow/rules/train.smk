# One rule for each stage that trains (maect/stages): pretrain, head, tune and so on.
for stage in filter(lambda stage: stage.trains, STAGES.values()):

    rule:
        name:
            stage.name
        input:
            config=resolved(stage.name, f"{RUN}/config.yaml"),
            made_of=lambda w: stamps(resolve.inputs_of_run(experiment, w.run)),
        output:
            stamp=f"{RUN}/done",
        log:
            f"{LOGS}/{{run}}/{stage.name}.log",
        benchmark:
            f"{BENCHMARKS}/{{run}}/{stage.name}.tsv"
        wildcard_constraints:
            run=one_of(experiment.runs_of(stage.name)),
        priority: 1  # other jobs wait for it
        localrule: True
        conda:
            ENVIRONMENT
        resources:
            **CLUSTER,
        params:
            config=f"{RUN}/config.yaml",
        message:
            stage.title.format(run="{wildcards.run}")
        shell:
            on_devices("maect train {params.config:q}", trains=True)


# One rule for each stage that does not: import, of weights from elsewhere.
for stage in filter(lambda stage: not stage.trains, STAGES.values()):

    rule:
        name:
            stage.name
        input:
            config=resolved(stage.name, f"{RUN}/config.yaml"),
        output:
            stamp=f"{RUN}/done",
        log:
            f"{LOGS}/{{run}}/{stage.name}.log",
        benchmark:
            f"{BENCHMARKS}/{{run}}/{stage.name}.tsv"
        wildcard_constraints:
            run=one_of(experiment.runs_of(stage.name)),
        conda:
            ENVIRONMENT
        resources:
            weights=weights_file,
        params:
            config=f"{RUN}/config.yaml",
        message:
            stage.title.format(run="{wildcards.run}") + " from {resources.weights}"
        shell:
            "maect import {params.config:q} 2> {log:q}"


rule encoders:
    input:
        expand(
            f"{RUN}/done",
            run=[name for name, run in experiment.runs.items() if not run.scored_by],
        ),
    localrule: True
