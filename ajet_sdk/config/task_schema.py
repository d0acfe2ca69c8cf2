"""The sections `task_reader` and `task_judge`: where tasks come from, and who judges what is made of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from ajet_sdk.config.schema import Section, key, section, wrong

__all__ = ["TaskJudge", "TaskReader"]


class DataFile(Section):
    file_path: str | None = key(None, "A JSON-lines file, one task a row; null: none.")


class JsonlDatasetFile(Section):
    training: DataFile = section(DataFile, "Tasks to train on.")
    validation: DataFile = section(DataFile, "Tasks to validate on.")


class HuggingfaceDatRepo(Section):
    dataset_path: str | None = key(
        None, "A hub name such as openai/gsm8k, or a directory of Parquet, Arrow or JSON files."
    )
    dataset_name: str | None = key(None, "The dataset's configuration, e.g. main; in a directory, a sub-directory.")
    training_split: str = key("train", "The split to train on.")
    validation_split: str | None = key("validation", "The split to validate on; null: none.")


class EnvService(Section):
    env_type: str = key("", "The kind of environment that the service is asked for.")
    env_url: str | list[str] = key(
        "http://127.0.0.1:8080", "Where the service listens; of several, each episode takes one that has room."
    )
    env_action_preference: Literal["code", "text", "box"] = key("code", "The form of an action.")
    training_split: str = key("train", "The service's split to train on.")
    validation_split: str | None = key("dev", "The service's split to validate on; null: none.")


class DocumentReader(Section):
    document_path: list[str] = key([], "Files or directories of documents.")
    languages: list[str] = key(["eng"], "Languages of the documents.")
    chunk_size: int = key(5120, "Longest piece of a document, in characters.", ge=1)
    split_by: Literal["sentence", "paragraph", "character"] = key("sentence", "Where a document may be cut.")
    cache_enabled: bool = key(True, "Keep what was read from the documents.")


class QueryReader(Section):
    type: str = key("jsonl_dataset_file", "Where example queries come from.")
    jsonl_dataset_file: JsonlDatasetFile = section(JsonlDatasetFile, "The example queries' files.")


class DeduplicationParams(Section):
    similarity_threshold: float = key(0.8, "Queries more alike than this are one.", ge=0, le=1)
    db_path: str = key("./.similarity_db", "Where the embeddings are kept.")
    model: str = key(
        "text-embedding-v4", "The embedding model, for likeness in meaning; used where `base_url` is given."
    )
    api_key: str | None = key(None, "Its key; better left null and given by the environment.")
    base_url: str | None = key(None, "Its endpoint; null: queries are compared by their letters alone.")


class DeduplicationFilter(Section):
    enabled: bool = key(True, "Drop queries that are too much alike.")
    params: DeduplicationParams = section(DeduplicationParams, "How alike is too much.")


class DataGeneration(Section):
    document_reader: DocumentReader = section(DocumentReader, "Documents to make tasks from.")
    query_reader: QueryReader = section(QueryReader, "Example queries.")
    task_num: int = key(10, "Tasks to make, those for validation among them.", ge=1)
    llm_model: str | None = key(None, "The model that writes the tasks: its name, or a local checkpoint's directory.")
    base_url: str | None = key(None, "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL.")
    scripted: str | None = key(None, "Class path of a function that writes the tasks in the place of a model.")
    verify: str = key(
        "agreement:3",
        "How answers are checked, as `ajet dataset expand --verify` says; of documents' tasks by default llm.",
    )
    unfenced: bool = key(
        False, "With verify: code, run programs of a model with your own rights where nothing here fences them in."
    )
    validation_share: float = key(
        0.1, "Share of the tasks for validation, where query_reader names no validation file.", ge=0, lt=1
    )
    llm_response_length: int = key(8192, "Its longest reply, in tokens.", ge=1)
    num_workers: int = key(32, "Requests at once.", ge=1)
    sampling_params: dict[str, Any] = key({}, "Its sampling parameters.")
    deduplication_filter: DeduplicationFilter = section(DeduplicationFilter, "Dropping of look-alikes.")


class TracingFilterParams(Section):
    custom_rubrics: str = key("", "llm_evaluate: what a good episode is, in words.")
    temperature: float = key(0.5, "llm_evaluate: sampling temperature of the grader.", ge=0)
    print_reason: bool = key(False, "llm_evaluate: print the grader's reasons.")
    max_thread: int = key(16, "llm_evaluate: requests at once.", ge=1)
    similarity_threshold: float = key(0.8, "deduplication: of tasks more alike than this one is kept.", ge=0, le=1)
    db_path: str | None = key(None, "deduplication: accepted, without effect; nothing is kept between runs.")
    model: str | None = key(None, "deduplication: accepted, without effect; tasks are compared by their words.")
    api_key: str | None = key(None, "The grader's key; better left null and given by OPENAI_API_KEY.")
    base_url: str | None = key(None, "The grader's endpoint; null: feedback_tracing.llm_base_url.")


class TracingFilter(Section):
    type: Literal["llm_evaluate", "deduplication"] = key("llm_evaluate", "The kind of filter.")
    enabled: bool = key(True, "Use this filter.")
    params: TracingFilterParams = section(TracingFilterParams, "Its parameters.")


class FeedbackTracing(Section):
    base_url: str | None = key(
        None, "The traces: a directory or file of ajet's, AgentScope Studio's database, OTLP or OpenAI logs."
    )
    train_output_path: str | None = key(None, "Where the tasks made of feedback are written.")
    alien_llm_model: str | None = key(None, "The model that grades; null: OPENAI_MODEL.")
    llm_base_url: str | None = key(None, "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL.")
    scripted: str | None = key(None, "Class path of a function that grades in the place of a model.")
    validation_share: float = key(0.1, "Share of the tasks for validation, by what they ask.", ge=0, lt=1)
    alien_llm_response_length: int = key(2048, "Its longest reply, in tokens.", ge=1)
    filters: list[TracingFilter] = key([], "Filters that an episode passes to become a task.")


class RandomDummy(Section):
    training: int = key(64, "Tasks to train on.", ge=1)
    validation: int = key(16, "Tasks to validate on.", ge=0)


class Llm(Section):
    rubric: str = key("", "What makes an output good, in words, or a .md or .txt file that says it.")
    mode: Literal["pointwise", "listwise", "pairwise"] = key(
        "pointwise", "Grade each output by itself, the list of a group's outputs, or each two of them."
    )
    model: str | None = key(None, "The model that judges; null: task_judge.alien_llm_model, else OPENAI_MODEL.")
    base_url: str | None = key(
        None, "Its OpenAI-compatible endpoint; null: OPENAI_BASE_URL, else DashScope where its key is there."
    )
    api_key_env: str = key("OPENAI_API_KEY", "The variable that holds its key.")
    examples: str | list[dict[str, Any]] = key(
        [], "Graded outputs to show it: rows with query, answer, score and reason, or a JSON-lines file of them."
    )
    min_score: float = key(0.0, "The least score.")
    max_score: float = key(1.0, "The highest score.")
    success_threshold: float | None = key(None, "A score from here on is a success; null: a reward of 1 is.")
    reference_key: str = key("answer", "Where a task's metadata has a right answer, to be shown where there is one.")
    show: Literal["output", "transcript"] = key("output", "What is judged: the output, or all messages too.")
    prompt: str | None = key(
        None,
        "Another question than ours, with {query}, {answer} (a group's: {answers}), {reference}, {rubric}, {examples}, "
        "{min_score} and {max_score}; the form of the reply is added.",
    )
    temperature: float = key(0.0, "Its sampling temperature.", ge=0)
    max_tokens: int | None = key(
        None, "Its longest reply, in tokens; null: alien_llm_response_length where that is given, else 1024.", ge=1
    )
    max_retries: int = key(2, "How often a reply that is no verdict is asked for again.", ge=0)
    cache: str | None = key(None, "A file that keeps replies by content for other processes; null: in memory.")
    price: str | None = key(None, "INPUT,OUTPUT: money for a million tokens of each, for the metric judge_cost.")


class Code(Section):
    seconds: float = key(10.0, "Time limit of a test.", gt=0)
    memory_mib: int = key(512, "Memory limit, in MiB.", ge=16)
    partial: bool = key(False, "The reward is the share of tests that pass; else 1 where all do.")
    unfenced: bool = key(False, "Run programs with your own rights where nothing here fences them in.")


class JudgePart(Section):
    judge: str = key("", "A judge by name, as --judge takes it: exact, math, llm:FILE, file.py:function, …")
    weight: float = key(1.0, "What its rewards count.")
    name: str | None = key(None, "The name of its rewards; null: its own.")


class RubricsAutoGrader(Section):
    model_name: str | None = key(None, "The model that grades.")
    grader_mode: Literal["pointwise", "listwise"] = key("pointwise", "Grade each output, or rank those of a group.")
    language: str = key("en", "The rubric's language.")
    query_field: str = key("main_query", "Where a row holds the question.")
    answer_field: str = key("final_answer", "Where an output's metadata holds the answer.")
    reference_field: str = key("answer", "Where a row holds the reference answer.")
    min_score: float = key(0.0, "The least score.")
    max_score: float = key(1.0, "The highest score.")
    success_threshold: float = key(0.7, "A score from here on is a success.")
    sampling_mode: str = key("all_samples", "Which of the scored examples the rubric is made of.")
    generate_number: int = key(1, "Rubrics that are made.", ge=1)
    query_specific_generate_number: int = key(1, "Rubrics that are made for each example.", ge=1)
    max_epochs: int = key(2, "Rounds of refinement.", ge=1)
    max_retries: int = key(3, "Tries of a request.", ge=0)
    aggregation_mode: str = key("keep_all", "How several rubrics become one.")
    enable_categorization: bool = key(False, "Sort rubrics into categories.")
    categories_number: int = key(5, "How many categories.", ge=1)
    num_reference_samples: int = key(20, "Scored examples that are used.", ge=1)
    grader_name: str = key("auto_grader", "The grader's name.")
    custom_evaluation_prompt: str | dict[str, Any] | None = key(None, "The prompt for grading; null: its own.")
    input_data_type: str = key("jsonl_dataset_file", "Where the scored examples come from.")
    jsonl_dataset_file: JsonlDatasetFile = section(JsonlDatasetFile, "The scored examples' file.")


READERS = (
    "huggingface_dat_repo", "jsonl_dataset_file", "env_service", "data_generation", "tracing", "random_dummy"
)  # fmt: skip


class TaskReader(Section):
    type: str = key(
        "huggingface_dat_repo",
        f"Where tasks come from: {', '.join(READERS)}, or the class path of a reader of your own, "
        "`my_reader.py->MyReader`.",
    )
    field_mapping: dict[str, str] = key(
        {},
        "Column to task field, e.g. `{problem: main_query, solution: metadata.answer}`. Without it the main query is "
        "`main_query`, `question`, `query`, `prompt`, `problem` or `instruction`; every other column is metadata.",
    )
    skip_bad_rows: bool = key(False, "Skip and count rows that are no task; false: the first one is an error.")
    jsonl_dataset_file: JsonlDatasetFile = section(JsonlDatasetFile, "For `type: jsonl_dataset_file`.")
    huggingface_dat_repo: HuggingfaceDatRepo = section(HuggingfaceDatRepo, "For `type: huggingface_dat_repo`.")
    env_service: EnvService = section(EnvService, "For `type: env_service`.")
    data_generation: DataGeneration = section(DataGeneration, "For `type: data_generation`.")
    feedback_tracing: FeedbackTracing = section(FeedbackTracing, "For `type: tracing`.")
    random_dummy: RandomDummy = section(RandomDummy, "For `type: random_dummy`: how many sums to make up.")

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in READERS or "->" in value:
            return value
        expected = f"{', '.join(READERS)} or a class path with ->"
        raise PydanticCustomError("literal_error", "{expected}", {"expected": expected})

    def has_environment(self, env_type: str) -> bool:
        """Whether a task has an environment: each of a service's tasks, and another that names one by `env_type`."""
        return self.type == "env_service" or (bool(env_type) and "env_url" in self.env_service.model_fields_set)


class TaskJudge(Section):
    judge_type: Literal[
        "customized_protocol", "exact", "regex", "math", "llm", "rubrics_auto_grader", "code", "combined"
    ] = key("customized_protocol", "Who gives the reward when the workflow does not.")
    judge_protocol: str | None = key(
        None,
        "Class path of the judge for `customized_protocol`: a function or a BaseJudge; null: the workflow's reward.",
    )
    answer_key: str = key("answer", "Where a task's metadata holds the right answer (exact, regex, math).")
    pattern: str | None = key(
        None,
        "For `regex`: what to look for in the output. The first group of the last match is compared with the answer; "
        "without a group a match is right.",
    )
    alien_llm_model: str | None = key(
        None, "The model of an LLM judge, for judges that read it (`config.ajet.task_judge.alien_llm_model`)."
    )
    alien_llm_response_length: int = key(512, "Its longest reply, in tokens, for judges that read it.", ge=1)
    llm: Llm = section(Llm, "For `llm`: a model that grades by a rubric.")
    rubrics_auto_grader: RubricsAutoGrader = section(
        RubricsAutoGrader,
        "For `rubrics_auto_grader`: a model that grades by a rubric that it makes of scored examples.",
    )
    code: Code = section(Code, "For `code`: a task's tests, run on the program in an output.")
    combined: list[JudgePart] = key([], "For `combined`: judges, each a mapping with judge, weight and name.")

    @model_validator(mode="after")
    def _needs(self) -> TaskJudge:
        if self.judge_type == "regex" and not self.pattern:
            raise wrong("pattern", "must be given for judge_type: regex {got}")
        if self.judge_type == "combined" and not (self.combined and all(part.judge for part in self.combined)):
            raise wrong("combined", "must name its judges for judge_type: combined {got}")
        return self
