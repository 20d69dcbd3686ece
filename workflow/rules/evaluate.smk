EVALUATION = f"{ROOT}/evaluations/{{run}}/{{evaluation}}"


rule features:
    input:
        encoder=f"{RUN}/encoder.safetensors",
        shards=lambda w: shard_index(w.dataset, w.split),
    output:
        f"{ROOT}/features/{{run}}/{{dataset}}-{{split}}{{norm}}.safetensors",
    log:
        f"{LOGS}/{{run}}/features-{{dataset}}-{{split}}{{norm}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/features-{{dataset}}-{{split}}{{norm}}.tsv"
    wildcard_constraints:
        norm=f"({re.escape(resolve.WITHOUT_NORM)}({re.escape(resolve.LAST)}[0-9]+)?)?",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        config=f"{ROOT}/features/{{run}}/{{dataset}}-{{split}}{{norm}}.yaml",
    message:
        "Features of {wildcards.run} on {wildcards.dataset} {wildcards.split}"
    shell:
        on_devices("maect features {params.config:q}")


for protocol in PROTOCOLS.values():

    rule:
        name:
            protocol.name
        input:
            lambda w: resolve.inputs_of_evaluation(experiment, w.run, w.evaluation),
        output:
            [f"{EVALUATION}.safetensors"] if protocol.writes_tensors else [],
            json=f"{EVALUATION}.json",
        log:
            f"{LOGS}/{{run}}/{{evaluation}}.log",
        benchmark:
            f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
        wildcard_constraints:
            evaluation=one_of(
                n for n, p in experiment.protocols.items() if p == protocol.name
            ),
        localrule: True
        conda:
            ENVIRONMENT
        resources:
            **CLUSTER,
        params:
            config=evaluation_file,
        message:
            "Evaluating {wildcards.run}: {wildcards.evaluation}"
        shell:
            on_devices("maect evaluate {params.config:q}")


rule evaluations:
    input:
        LOST_SHARDS,
        [
            f"{ROOT}/evaluations/{run}/{name}.json"
            for run, name in experiment.evaluations
        ],
    localrule: True
