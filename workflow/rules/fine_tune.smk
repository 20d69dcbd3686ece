rule fine_tune:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        train=shards_of("train_split"),
        test=shards_of("test_split"),
    output:
        f"{EVALUATION}/{{evaluation}}.json",
    log:
        f"{LOGS}/{{run}}/{{evaluation}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
    wildcard_constraints:
        evaluation=one_of(evaluations_with("fine_tune")),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        settings=protocol_arguments,
        resize=resize_of(DATASET),
    message:
        "Fine-tuning {wildcards.run}: {wildcards.evaluation}"
    shell:
        on_devices(
            "maect evaluate fine_tune $(dirname {input.encoder}) --out {output}"
            " --train-shards $(dirname {input.train}) --test-shards $(dirname {input.test})"
            " {params.resize} {params.settings:q}"
        )
