"""The sections `task_reader` and `task_judge`: sources of tasks, and judges of outputs."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from ajet_sdk.config.judge_kinds import CUSTOM, KINDS, judge_kinds
from ajet_sdk.config.schema import Section, key, section, wrong
from ajet_sdk.types import Json


class DataFile(Section):
    file_path: str | None = key(None, "JSON-lines file with one task per line; null: none.")


class ValidationFile(Section):
    file_path: str | dict[str, str] | None = key(
        None,
        "JSON-lines file with one task per line, or several by name, as in `{old: a.jsonl, new:"
        " b.jsonl}`: each is a set whose rewards are reported apart, and its tasks get the name as"
        " metadata `validation_set`; null: none.",
    )


class JsonlDatasetFile(Section):
    training: DataFile = section(DataFile, "Training tasks.")
    validation: ValidationFile = section(ValidationFile, "Validation tasks.")


class ExampleFiles(Section):
    training: DataFile = section(DataFile, "Training examples.")
    validation: DataFile = section(DataFile, "Validation examples.")


class HuggingfaceDatRepo(Section):
    dataset_path: str | None = key(
        None,
        "Hugging Face name such as openai/gsm8k, or a directory of Parquet, Arrow or JSON files.",
    )
    dataset_name: str | None = key(
        None, "Configuration of the dataset, e.g. main; for a directory, a subdirectory."
    )
    training_split: str = key("train", "Training split.")
    validation_split: str | None = key("validation", "Validation split; null: none.")


class EnvService(Section):
    env_type: str = key("", "Type of environment to request from the service.")
    env_url: str | list[str] = key(
        "http://127.0.0.1:8080",
        "URL of the environment service; from a list, each episode uses one with free capacity.",
    )
    env_action_preference: Literal["code", "text", "box"] = key("code", "Format of actions.")
    training_split: str = key("train", "Training split of the service.")
    validation_split: str | None = key("dev", "Validation split of the service; null: none.")


class DocumentReader(Section):
    document_path: list[str] = key([], "Files or directories of documents.")
    languages: list[str] = key(["eng"], "Languages of the documents.")
    chunk_size: int = key(5120, "Maximum length of a chunk, in characters.", ge=1)
    split_by: Literal["sentence", "paragraph", "character"] = key(
        "sentence", "Boundaries at which documents are cut."
    )
    cache_enabled: bool = key(True, "Cache the parsed documents.")


class QueryReader(Section):
    type: str = key("jsonl_dataset_file", "Format of the example queries.")
    jsonl_dataset_file: ExampleFiles = section(ExampleFiles, "Files of example queries.")


class DeduplicationParams(Section):
    similarity_threshold: float = key(
        0.8, "Similarity above which two queries count as duplicates.", ge=0, le=1
    )
    db_path: str = key("./.similarity_db", "Where embeddings are stored.")
    model: str = key("text-embedding-v4", "Embedding model.")
    api_key: str | None = key(None, "Its API key.")
    base_url: str | None = key(None, "Its endpoint.")


class DeduplicationFilter(Section):
    enabled: bool = key(True, "Drop queries that are too similar to others.")
    params: DeduplicationParams = section(
        DeduplicationParams, "Similarity threshold and embedding model."
    )


class DataGeneration(Section):
    document_reader: DocumentReader = section(DocumentReader, "Documents to generate tasks from.")
    query_reader: QueryReader = section(QueryReader, "Example queries.")
    task_num: int = key(10, "Number of tasks to generate, including those for validation.", ge=1)
    llm_model: str | None = key(
        None, "Model that generates the tasks: its name, or a local checkpoint's directory."
    )
    base_url: str | None = key(None, "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL.")
    scripted: str | None = key(
        None, "Class path of a function that returns the replies instead of a model."
    )
    verify: str = key(
        "agreement:3",
        "How answers are verified, as in `ajet dataset expand --verify`; default for documents:"
        " llm.",
    )
    verify_model: str | None = key(
        None, "Model that verifies instead of the writer, as in `--verify-model`: NAME@URL."
    )
    unfenced: bool = key(
        False,
        "With verify: code, run generated programs without a sandbox if this machine has none.",
    )
    validation_share: float = key(
        0.1,
        "Fraction of the tasks used for validation if query_reader names no validation file.",
        ge=0,
        lt=1,
    )
    llm_response_length: int = key(8192, "Maximum length of its reply, in tokens.", ge=1)
    num_workers: int = key(32, "Maximum number of concurrent requests.", ge=1)
    sampling_params: Json = key({}, "Its sampling parameters.")
    deduplication_filter: DeduplicationFilter = section(
        DeduplicationFilter, "Removal of near-duplicates."
    )


class TracingFilterParams(Section):
    custom_rubrics: str = key("", "llm_evaluate: description of a good episode.")
    temperature: float = key(0.5, "llm_evaluate: sampling temperature of the grader.", ge=0)
    print_reason: bool = key(False, "llm_evaluate: print the grader's reasons.")
    max_thread: int = key(16, "llm_evaluate: maximum number of concurrent requests.", ge=1)
    similarity_threshold: float = key(
        0.8, "deduplication: similarity above which only one of the tasks is kept.", ge=0, le=1
    )
    db_path: str | None = key(
        None, "deduplication: accepted, but has no effect; nothing is stored between runs."
    )
    model: str | None = key(
        None, "deduplication: accepted, but has no effect; tasks are compared by their words."
    )
    api_key: str | None = key(
        None, "API key of the grader; leave it null and set OPENAI_API_KEY instead."
    )
    base_url: str | None = key(None, "Endpoint of the grader; null: feedback_tracing.llm_base_url.")


class TracingFilter(Section):
    type: Literal["llm_evaluate", "deduplication"] = key("llm_evaluate", "Type of filter.")
    enabled: bool = key(True, "Use this filter.")
    params: TracingFilterParams = section(TracingFilterParams, "Its parameters.")


class FeedbackTracing(Section):
    base_url: str | None = key(
        None,
        "Traces to read: a directory or file of ajet traces, an AgentScope Studio database, OTLP or"
        " OpenAI logs.",
    )
    train_output_path: str | None = key(None, "Where to write the tasks made from feedback.")
    alien_llm_model: str | None = key(None, "Model that grades; null: OPENAI_MODEL.")
    llm_base_url: str | None = key(None, "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL.")
    scripted: str | None = key(
        None, "Class path of a function that returns the grader's replies instead of a model."
    )
    validation_share: float = key(
        0.1,
        "Fraction of the tasks used for validation; tasks with the same question stay together.",
        ge=0,
        lt=1,
    )
    alien_llm_response_length: int = key(2048, "Maximum length of its reply, in tokens.", ge=1)
    filters: list[TracingFilter] = key([], "Filters that an episode must pass to become a task.")


class Growing(Section):
    every: int = key(10, "Add tasks before the first step and after every so many steps.", ge=1)
    tasks: int = key(16, "Tasks to add each time.", ge=1)
    max_calls: int = key(64, "Most requests to the model that writes them, each time.", ge=1)
    attempts: int = key(8, "Attempts of the current policy at each new task.", ge=1)
    band: str = key("0.2:0.8", "Keep tasks whose pass rate is in this range, LOW:HIGH.")


class RandomDummy(Section):
    training: int = key(64, "Training tasks.", ge=1)
    validation: int = key(16, "Validation tasks.", ge=0)


class Llm(Section):
    rubric: str = key("", "Rubric: what makes an output good, as text or as a .md or .txt file.")
    mode: Literal["pointwise", "listwise", "pairwise"] = key(
        "pointwise",
        "Grade each output on its own, all outputs of a group at once, or each pair of them.",
    )
    model: str | None = key(
        None, "Model that judges; null: task_judge.alien_llm_model, else OPENAI_MODEL."
    )
    base_url: str | None = key(
        None,
        "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL, else DashScope if its API key is"
        " set.",
    )
    api_key_env: str = key("OPENAI_API_KEY", "Environment variable that holds its API key.")
    scripted: str | None = key(
        None, "Class path of a function that returns the replies instead of a model."
    )
    examples: str | list[Json] = key(
        [],
        "Graded examples to show it: rows with query, answer, score and reason, or a JSON-lines"
        " file of them.",
    )
    min_score: float = key(0.0, "Lowest score.")
    max_score: float = key(1.0, "Highest score.")
    success_threshold: float | None = key(
        None, "Score from which an episode counts as a success; null: a reward of 1."
    )
    reference_key: str = key(
        "answer",
        "Metadata key of the reference answer; it is shown to the model if the task has one.",
    )
    show: Literal["output", "transcript"] = key(
        "output", "What is judged: the output only, or all messages."
    )
    pictures: bool = key(
        True,
        "Send the pictures of a task (and of the messages, if they are shown) to the model, which"
        " must take them; false: a line for each.",
    )
    prompt: str | None = key(
        None,
        "Custom prompt with {query}, {answer} (for a group: {answers}), {reference}, {rubric},"
        " {examples}, {min_score} and {max_score}; the reply format is appended.",
    )
    temperature: float = key(0.0, "Its sampling temperature.", ge=0)
    max_tokens: int | None = key(
        None,
        "Maximum length of its reply, in tokens; null: alien_llm_response_length if set, else"
        " 1024.",
        ge=1,
    )
    max_retries: int = key(2, "Number of retries if a reply contains no verdict.", ge=0)
    cache: str | None = key(
        None, "File that caches replies across processes; null: cached in memory only."
    )
    price: str | None = key(
        None, "INPUT,OUTPUT: price of a million tokens of each, for the metric judge_cost."
    )


class Code(Section):
    seconds: float = key(10.0, "Time limit of a test, in seconds.", gt=0)
    memory_mib: int = key(512, "Memory limit, in MiB.", ge=16)
    partial: bool = key(
        False, "true: the reward is the fraction of tests passed; false: 1 if all pass, else 0."
    )
    unfenced: bool = key(
        False,
        "Run programs without a sandbox, with your own permissions, if this machine has none.",
    )


class JudgePart(Section):
    judge: str = key("", "A judge, as for --judge.")
    weight: float = key(1.0, "Weight of its reward.")
    name: str | None = key(None, "Name of its reward in reports; null: the judge's.")


class RubricsAutoGrader(Section):
    model_name: str | None = key(None, "Model that grades.")
    grader_mode: Literal["pointwise", "listwise"] = key(
        "pointwise", "Grade each output on its own, or rank those of a group."
    )
    language: str = key("en", "Language of the rubric.")
    query_field: str = key("main_query", "Column of the question.")
    answer_field: str = key("final_answer", "Key of the answer in an output's metadata.")
    reference_field: str = key("answer", "Column of the reference answer.")
    min_score: float = key(0.0, "Lowest score.")
    max_score: float = key(1.0, "Highest score.")
    success_threshold: float = key(0.7, "Score from which an output counts as a success.")
    sampling_mode: str = key("all_samples", "How the examples for the rubric are selected.")
    generate_number: int = key(1, "Number of rubrics to generate.", ge=1)
    query_specific_generate_number: int = key(1, "Number of rubrics to generate per example.", ge=1)
    max_epochs: int = key(2, "Rounds of refinement.", ge=1)
    max_retries: int = key(3, "Attempts per request.", ge=0)
    aggregation_mode: str = key("keep_all", "How several rubrics are combined.")
    enable_categorization: bool = key(False, "Sort rubrics into categories.")
    categories_number: int = key(5, "Number of categories.", ge=1)
    num_reference_samples: int = key(20, "Number of scored examples to use.", ge=1)
    grader_name: str = key("auto_grader", "Name of the grader.")
    custom_evaluation_prompt: str | Json | None = key(
        None, "Custom grading prompt; null: the built-in one."
    )
    input_data_type: str = key("jsonl_dataset_file", "Format of the scored examples.")
    jsonl_dataset_file: ExampleFiles = section(ExampleFiles, "File of scored examples.")


READERS = (
    "huggingface_dat_repo",
    "jsonl_dataset_file",
    "env_service",
    "data_generation",
    "growing",
    "tracing",
    "random_dummy",
)


class TaskReader(Section):
    type: str = key(
        "huggingface_dat_repo",
        f"Where tasks come from: {', '.join(READERS)}, or the class path of your own reader,"
        " `my_reader.py->MyReader`.",
    )
    field_mapping: dict[str, str] = key(
        {},
        "Maps columns to task fields, e.g. `{problem: main_query, solution: metadata.answer}`. By"
        " default the main query is the column `main_query`, `question`, `query`, `prompt`,"
        " `problem` or `instruction`; every other column becomes metadata.",
    )
    jsonl_dataset_file: JsonlDatasetFile = section(
        JsonlDatasetFile, "For `type: jsonl_dataset_file`."
    )
    huggingface_dat_repo: HuggingfaceDatRepo = section(
        HuggingfaceDatRepo, "For `type: huggingface_dat_repo`."
    )
    env_service: EnvService = section(EnvService, "For `type: env_service`.")
    data_generation: DataGeneration = section(DataGeneration, "For `type: data_generation`.")
    growing: Growing = section(
        Growing,
        "For `type: growing`: add tasks during training; data_generation names the seeds and who"
        " writes.",
    )
    feedback_tracing: FeedbackTracing = section(FeedbackTracing, "For `type: tracing`.")
    random_dummy: RandomDummy = section(
        RandomDummy, "For `type: random_dummy`: number of sums to generate."
    )

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in READERS or "->" in value:
            return value
        expected = f"{', '.join(READERS)} or a class path with ->"
        raise PydanticCustomError("literal_error", "{expected}", {"expected": expected})

    def has_environment(self, env_type: str) -> bool:
        """Whether a task has an environment: it comes from a service or names an `env_type`."""
        return self.type == "env_service" or (
            bool(env_type) and "env_url" in self.env_service.model_fields_set
        )


class TaskJudge(Section):
    judge_type: str = key(
        CUSTOM,
        f"What computes the reward if the workflow does not: {', '.join((CUSTOM, *KINDS))}, or a"
        " judge of an installed package.",
    )
    judge_protocol: str | None = key(
        None,
        "For `customized_protocol`: class path of the judge, a function or a BaseJudge; null: the"
        " workflow's reward.",
    )
    pattern: str | None = key(
        None,
        "For `regex`: pattern to search for in the output. The first group of the last match is"
        " compared with the reference answer; without a group, any match is correct.",
    )
    alien_llm_model: str | None = key(
        None, "Model for LLM judges that read it (`config.ajet.task_judge.alien_llm_model`)."
    )
    alien_llm_response_length: int = key(
        512, "Maximum length of its reply, in tokens, for judges that read it.", ge=1
    )
    llm: Llm = section(Llm, "For `llm`: a model grades by a rubric.")
    rubrics_auto_grader: RubricsAutoGrader = section(
        RubricsAutoGrader,
        "For `rubrics_auto_grader`: a model grades by a rubric generated from scored examples.",
    )
    code: Code = section(Code, "For `code`: runs a task's tests on the program in the output.")
    combined: list[JudgePart] = key(
        [], "For `combined`: a list of judges, each with judge, weight and name."
    )

    options: Json = key(
        {},
        "For a judge of an installed package: its settings; `--judge NAME:TEXT` sets `argument`.",
    )

    @field_validator("judge_type")
    @classmethod
    def _known(cls, value: str) -> str:
        if (
            value in (CUSTOM, *KINDS) or value in judge_kinds()
        ):  # reading the installed packages takes time
            return value
        raise PydanticCustomError(
            "literal_error", "{expected}", {"expected": ", ".join((CUSTOM, *judge_kinds()))}
        )

    @model_validator(mode="after")
    def _needs(self) -> TaskJudge:
        if self.judge_type == "regex" and not self.pattern:
            raise wrong("pattern", "is required for judge_type: regex {got}")
        if self.judge_type == "combined" and not (
            self.combined and all(part.judge for part in self.combined)
        ):
            raise wrong("combined", "is required for judge_type: combined {got}")
        return self
