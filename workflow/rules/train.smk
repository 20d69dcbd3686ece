rule pretrain:
    input:
        lambda w: shard_index(run_of(w).dataset, "train"),
    output:
        encoder=f"{RUN}/encoder.safetensors",
        record=f"{RUN}/run.json",
    log:
        f"{LOGS}/{{run}}/pretrain.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/pretrain.tsv"
    wildcard_constraints:
        run=one_of(experiment.runs_of("pretrain")),
    # Others wait for it.
    priority: 1
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        shards=lambda w: experiment.shards(run_of(w).dataset, "train"),
        recipe=lambda w: run_of(w).arguments,
        digest=lambda w: run_of(w).digest,
    message:
        "Pre-training {wildcards.run}"
    shell:
        on_devices(
            "maect pretrain $(dirname {output.record}) --shards {params.shards:q}"
            " {params.recipe:q} --save-every-minutes {resources.save_every_minutes}"
            " --stage-to={resources.stage_to:q}"
        )


rule import_weights:
    output:
        encoder=f"{RUN}/encoder.safetensors",
        record=f"{RUN}/run.json",
    log:
        f"{LOGS}/{{run}}/import.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/import.tsv"
    wildcard_constraints:
        run=one_of(experiment.runs_of("import")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        weights=weights_file,
    params:
        arguments=lambda w: run_of(w).arguments,
        digest=lambda w: run_of(w).digest,
    message:
        "Importing {wildcards.run} from {resources.weights}"
    shell:
        "maect import {resources.weights:q} $(dirname {output.record}) {params.arguments:q}"
        " 2> {log}"


rule init_head:
    input:
        lambda w: shard_index(run_of(w).dataset, "train"),
        source_files,
    output:
        encoder=f"{RUN}/encoder.safetensors",
        head=f"{RUN}/head.safetensors",
        record=f"{RUN}/run.json",
    log:
        f"{LOGS}/{{run}}/init_head.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/init_head.tsv"
    wildcard_constraints:
        run=one_of(experiment.runs_of("head")),
    # Others wait for it.
    priority: 1
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        shards=lambda w: experiment.shards(run_of(w).dataset, "train"),
        source=lambda w: f"{ROOT}/runs/{run_of(w).source}",
        recipe=lambda w: run_of(w).arguments,
        digest=lambda w: run_of(w).digest,
    message:
        "Initialising the NNCLR head {wildcards.run}"
    shell:
        on_devices(
            "maect init-head $(dirname {output.record}) --shards {params.shards:q} --from {params.source:q}"
            " {params.recipe:q} --save-every-minutes {resources.save_every_minutes}"
            " --stage-to={resources.stage_to:q}"
        )


rule tune:
    input:
        lambda w: shard_index(run_of(w).dataset, "train"),
        source_files,
    output:
        encoder=f"{RUN}/encoder.safetensors",
        head=f"{RUN}/head.safetensors",
        record=f"{RUN}/run.json",
    log:
        f"{LOGS}/{{run}}/tune.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/tune.tsv"
    wildcard_constraints:
        run=one_of(experiment.runs_of("tune")),
    # Others wait for it.
    priority: 1
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        shards=lambda w: experiment.shards(run_of(w).dataset, "train"),
        source=lambda w: f"{ROOT}/runs/{run_of(w).source}",
        recipe=lambda w: run_of(w).arguments,
        digest=lambda w: run_of(w).digest,
    message:
        "Contrastive tuning of {wildcards.run}"
    shell:
        on_devices(
            "maect tune $(dirname {output.record}) --shards {params.shards:q} --from {params.source:q}"
            " {params.recipe:q} --save-every-minutes {resources.save_every_minutes}"
            " --stage-to={resources.stage_to:q}"
        )


rule encoders:
    input:
        expand(rules.tune.output.encoder, run=experiment.runs),
    localrule: True
