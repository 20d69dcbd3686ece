# Evaluations that need only stored features, cheap enough for a CPU partition.
ON_FEATURES = ["knn", "low_shot", "clustering"]


rule features:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        shards=lambda w: shard_index(w.dataset, w.split),
    output:
        f"{ROOT}/features/{{run}}/{{dataset}}-{{split}}.safetensors",
    log:
        f"{LOGS}/{{run}}/features-{{dataset}}-{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/features-{{dataset}}-{{split}}.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        shards=lambda w: experiment.shards(w.dataset, w.split),
        resize=lambda w: resize_of(w.dataset),
    message:
        "Features of {wildcards.run} on {wildcards.dataset} {wildcards.split}"
    shell:
        on_devices(
            "maect features $(dirname {input.encoder}) --shards {params.shards:q}"
            " --out {output} {params.resize}"
        )


rule evaluate:
    input:
        train=train_features,
        test=test_features,
    output:
        f"{EVALUATION}/{{protocol}}.json",
    log:
        f"{LOGS}/{{run}}/{{protocol}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{protocol}}.tsv"
    wildcard_constraints:
        protocol=one_of(ON_FEATURES),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=lambda w: protocol_arguments(w.protocol),
    message:
        "Evaluating {wildcards.run}: {wildcards.protocol}"
    shell:
        on_devices(
            "maect evaluate {wildcards.protocol} {params.run:q} --out {output}"
            " --train-features {input.train} --test-features {input.test}"
            " {params.settings:q}"
        )


rule linear_probe:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        train=lambda w: shard_index(
            DATASET, experiment.protocols["linear_probe"].train_split
        ),
        test=lambda w: shard_index(
            DATASET, experiment.protocols["linear_probe"].test_split
        ),
    output:
        f"{EVALUATION}/linear_probe.json",
    log:
        f"{LOGS}/{{run}}/linear_probe.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/linear_probe.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        settings=protocol_arguments("linear_probe"),
        resize=resize_of(DATASET),
    message:
        "Evaluating {wildcards.run}: linear probe"
    shell:
        on_devices(
            "maect evaluate linear_probe $(dirname {input.encoder}) --out {output}"
            " --train-shards $(dirname {input.train}) --test-shards $(dirname {input.test})"
            " {params.resize} {params.settings:q}"
        )


rule umap:
    input:
        test=f"{ROOT}/features/{{run}}/{DATASET}-{test_split('umap')}.safetensors",
    output:
        json=f"{EVALUATION}/umap.json",
        points=f"{EVALUATION}/umap.safetensors",
    log:
        f"{LOGS}/{{run}}/umap.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/umap.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=protocol_arguments("umap"),
    message:
        "Evaluating {wildcards.run}: UMAP"
    shell:
        on_devices(
            "maect evaluate umap {params.run:q} --out {output.json}"
            " --test-features {input.test} {params.settings:q}"
        )


rule evaluations:
    input:
        results_of(experiment.runs, experiment.protocols),
    localrule: True
