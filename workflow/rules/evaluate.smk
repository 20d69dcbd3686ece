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
        train=features_of("train_split"),
        test=features_of("test_split"),
    output:
        f"{EVALUATION}/{{evaluation}}.json",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("knn", "low_shot")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        protocol=protocol_of,
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=protocol_arguments,
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate {params.protocol} {params.run:q} --out {output}"
            " --train-features {input.train} --test-features {input.test}"
            " {params.settings:q}"
        )


rule linear_probe:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        train=shards_of("train_split"),
        test=shards_of("test_split"),
    output:
        json=f"{EVALUATION}/{{evaluation}}.json",
        heads=f"{EVALUATION}/{{evaluation}}.safetensors",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("linear_probe", "color_histogram")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        protocol=protocol_of,
        settings=protocol_arguments,
        resize=resize_of(DATASET),
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate {params.protocol} $(dirname {input.encoder}) --out {output.json}"
            " --train-shards $(dirname {input.train}) --test-shards $(dirname {input.test})"
            " {params.resize} {params.settings:q}"
        )


rule clustering:
    input:
        test=features_of("test_split"),
    output:
        json=f"{EVALUATION}/{{evaluation}}.json",
        clusters=f"{EVALUATION}/{{evaluation}}.safetensors",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("clustering")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=protocol_arguments,
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate clustering {params.run:q} --out {output.json}"
            " --test-features {input.test} {params.settings:q}"
        )


rule retrieval:
    input:
        test=features_of("test_split"),
        shards=shards_of("test_split"),
        clusters=lambda w: left_by(w, "clustering"),
    output:
        json=f"{EVALUATION}/{{evaluation}}.json",
        images=f"{EVALUATION}/{{evaluation}}.safetensors",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("retrieval")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=protocol_arguments,
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate retrieval {params.run:q} --out {output.json}"
            " --test-features {input.test} --test-shards $(dirname {input.shards})"
            " --clusters {input.clusters} {params.settings:q}"
        )


rule robustness:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        probe=lambda w: left_by(w, "probe"),
        shards=lambda w: [shard_index(DATASET, s) for s in settings_of(w).splits],
    output:
        f"{EVALUATION}/{{evaluation}}.json",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("robustness")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        splits=lambda w: [
            part
            for split in settings_of(w).splits
            for part in ("--split", f"{split}={experiment.shards(DATASET, split)}")
        ],
        settings=protocol_arguments,
        resize=resize_of(DATASET),
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate robustness $(dirname {input.encoder}) --out {output}"
            " --probe {input.probe} {params.splits:q} {params.resize}"
            " {params.settings:q}"
        )


rule effective_invariance:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        probe=lambda w: left_by(w, "probe"),
        shards=shards_of("test_split"),
    output:
        f"{EVALUATION}/{{evaluation}}.json",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("effective_invariance")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        settings=protocol_arguments,
        resize=resize_of(DATASET),
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate effective_invariance $(dirname {input.encoder}) --out {output}"
            " --probe {input.probe} --test-shards $(dirname {input.shards})"
            " {params.resize} {params.settings:q}"
        )


rule throughput:
    input:
        encoder=f"{RUN}/encoder.safetensors",
    output:
        f"{EVALUATION}/{{evaluation}}.json",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("throughput")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        settings=protocol_arguments,
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate throughput $(dirname {input.encoder}) --out {output}"
            " {params.settings:q}"
        )


rule umap:
    input:
        test=features_of("test_split"),
    output:
        json=f"{EVALUATION}/{{evaluation}}.json",
        points=f"{EVALUATION}/{{evaluation}}.safetensors",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("umap")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        run=lambda w: f"{ROOT}/runs/{w.run}",
        settings=protocol_arguments,
    message:
        "Evaluating {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate umap {params.run:q} --out {output.json}"
            " --test-features {input.test} {params.settings:q}"
        )


rule evaluations:
    input:
        results_of(experiment.runs, experiment.protocols),
    localrule: True
