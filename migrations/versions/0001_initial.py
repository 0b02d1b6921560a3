"""All tables, with PostgreSQL triggers that protect studies and submissions from other logins.

Only the login that created a study may rename, archive or delete it. Only the login that created a submission may
cancel, pause, resume, rename or delete it. The owner of the tables may change every study and submission.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_initial"
down_revision = None
branch_labels = None
depends_on = None

MOMENT = sa.DateTime(timezone=True)
NUMBER = sa.Float(53)
TRIAL_STATES = (
    "'queued', 'running', 'paused', 'reached', 'pruned', 'capped', "
    "'exhausted', 'oom', 'diverged', 'failed', 'lost', 'cancelled'"
)

CHECK_MAKER = """
CREATE OR REPLACE FUNCTION bss_check_maker() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  owner name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = TG_RELID);
  is_owner boolean := pg_has_role(session_user, owner, 'MEMBER');
BEGIN
  IF TG_OP = 'INSERT' THEN
    IF NEW.login IS NULL OR NOT is_owner THEN
      NEW.login := session_user;
    END IF;
    RETURN NEW;
  END IF;
  IF NOT is_owner AND OLD.login IS DISTINCT FROM session_user THEN
    RAISE EXCEPTION 'the study % may be renamed, archived or deleted by % alone',
      quote_literal(OLD.name), concat(OLD.login || ', who made it, and ', 'members of ', owner)
      USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'bss_study_maker';
  END IF;
  IF TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  RETURN NEW;
END $$
"""
"""The functions use the login even if a role is set, and search only schemas that other users cannot write to."""

MAKER = """
CREATE TRIGGER bss_study_maker
BEFORE INSERT OR DELETE OR UPDATE OF name, created_by, created_at, archived_at, login ON bss_study
FOR EACH ROW EXECUTE FUNCTION bss_check_maker()
"""

CHECK_SUBMITTER = """
CREATE OR REPLACE FUNCTION bss_check_submitter() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  owner name := (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = TG_RELID);
  is_owner boolean := pg_has_role(session_user, owner, 'MEMBER');
BEGIN
  IF TG_OP = 'INSERT' THEN
    IF NEW.login IS NULL OR NOT is_owner THEN
      NEW.login := session_user;
    END IF;
    RETURN NEW;
  END IF;
  IF is_owner OR OLD.login IS NOT DISTINCT FROM session_user THEN
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
  END IF;
  IF TG_OP = 'UPDATE' AND OLD.state = 'waiting' AND NEW.state IN ('waiting', 'done', 'failed')
      AND NEW.name = OLD.name THEN
    RETURN NEW;
  END IF;
  RAISE EXCEPTION 'the submission % may be cancelled, paused, resumed, renamed or deleted by % alone',
    quote_literal(OLD.name), concat(OLD.login || ', who submitted it, and ', 'members of ', owner)
    USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'bss_submission_submitter';
END $$
"""
"""Another login may only record the end of a waiting study, because the trigger cannot identify workers."""

SUBMITTER = """
CREATE TRIGGER bss_submission_submitter
BEFORE INSERT OR DELETE OR UPDATE OF name, state, login ON bss_submission
FOR EACH ROW EXECUTE FUNCTION bss_check_submitter()
"""

POSTGRESQL = (
    CHECK_MAKER,
    "DROP TRIGGER IF EXISTS bss_study_maker ON bss_study",
    MAKER,
    CHECK_SUBMITTER,
    "DROP TRIGGER IF EXISTS bss_submission_submitter ON bss_submission",
    SUBMITTER,
)
"""SQL for the triggers, also in the printed schema. Every statement can run twice."""


def upgrade() -> None:
    op.create_table(
        "bss_environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("device_type", sa.Text(), nullable=False),
        sa.Column("device_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("precision", sa.Text(), nullable=False),
        sa.Column("compile_mode", sa.Text(), nullable=False),
        sa.Column("torch_version", sa.Text(), nullable=False),
        sa.Column("cuda_version", sa.Text(), nullable=True),
        sa.Column("driver_version", sa.Text(), nullable=True),
        sa.Column("python_version", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("workload_revision", sa.Text(), nullable=True),
        sa.Column("cudnn_version", sa.Text(), nullable=True),
        sa.Column("git_revision", sa.Text(), nullable=True),
        sa.Column("git_dirty", sa.Boolean(), nullable=True),
        sa.Column("libraries", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_environment")),
        sa.UniqueConstraint("digest", name=op.f("uq_bss_environment_digest")),
    )
    op.create_table(
        "bss_submission",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("login", sa.Text(), nullable=True),
        sa.Column("priority", NUMBER, nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("not_before", MOMENT, nullable=True),
        sa.Column("submitted_at", MOMENT, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("served_seconds", NUMBER, nullable=False),
        sa.CheckConstraint("name <> ''", name=op.f("ck_bss_submission_name_not_empty")),
        sa.CheckConstraint("priority > 0", name=op.f("ck_bss_submission_priority_positive")),
        sa.CheckConstraint("served_seconds >= 0", name=op.f("ck_bss_submission_served_seconds_not_negative")),
        sa.CheckConstraint(
            "state IN ('waiting', 'paused', 'cancelled', 'done', 'failed')", name=op.f("ck_bss_submission_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_submission")),
        sa.UniqueConstraint("name", name=op.f("uq_bss_submission_name")),
    )
    op.create_index(op.f("ix_bss_submission_owner"), "bss_submission", ["owner"], unique=False)
    op.create_index(op.f("ix_bss_submission_state"), "bss_submission", ["state"], unique=False)
    op.create_table(
        "bss_worker",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("slots", sa.Text(), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=True),
        sa.Column("templates", sa.JSON(), nullable=False),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.Column("left_at", MOMENT, nullable=True),
        sa.Column("serving", sa.Text(), nullable=True),
        sa.Column("serving_since", MOMENT, nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_bss_worker")),
    )
    op.create_table(
        "bss_study",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.Text(), nullable=False),
        sa.Column("objective", sa.Text(), nullable=False),
        sa.Column("target_metric", sa.Text(), nullable=False),
        sa.Column("target_value", NUMBER, nullable=False),
        sa.Column("target_goal", sa.String(16), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("archived_at", MOMENT, nullable=True),
        sa.Column("environment_id", sa.Integer(), nullable=True),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("rewritten_at_revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("probed_at_revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("login", sa.Text(), nullable=True),
        sa.CheckConstraint("name <> ''", name=op.f("ck_bss_study_name_not_empty")),
        sa.CheckConstraint(
            "length(objective) >= 1 AND length(objective) <= 64", name=op.f("ck_bss_study_objective_length")
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_study_environment_id"), ondelete="RESTRICT"
        ),
        sa.CheckConstraint("target_goal IN ('maximize', 'minimize')", name=op.f("ck_bss_study_target_goal")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_study")),
        sa.UniqueConstraint("name", name=op.f("uq_bss_study_name")),
    )
    op.create_index(op.f("ix_bss_study_environment_id"), "bss_study", ["environment_id"], unique=False)
    op.create_table(
        "bss_branch",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("measured_at", MOMENT, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("start_samples", sa.BigInteger(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("learning_rate", NUMBER, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("start_metric", NUMBER, nullable=True),
        sa.Column("metric", NUMBER, nullable=True),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_bss_branch_batch_size_positive")),
        sa.CheckConstraint("learning_rate > 0", name=op.f("ck_bss_branch_learning_rate_positive")),
        sa.CheckConstraint("micro_batch_size > 0", name=op.f("ck_bss_branch_micro_batch_size_positive")),
        sa.CheckConstraint("samples > 0", name=op.f("ck_bss_branch_samples_positive")),
        sa.CheckConstraint("start_samples >= 0", name=op.f("ck_bss_branch_start_samples_not_negative")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_branch_environment_id"), ondelete="RESTRICT"
        ),
        sa.ForeignKeyConstraint(
            ["study_id"], ["bss_study.id"], name=op.f("fk_bss_branch_study_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_branch")),
        sa.UniqueConstraint(
            "study_id", "environment_id", "digest", name=op.f("uq_bss_branch_study_id_environment_id_digest")
        ),
    )
    op.create_index(op.f("ix_bss_branch_environment_id"), "bss_branch", ["environment_id"], unique=False)
    op.create_table(
        "bss_claim",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", MOMENT, nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_claim_study_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "name", name=op.f("pk_bss_claim")),
    )
    op.create_table(
        "bss_finding",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("stamp", sa.Text(), nullable=False),
        sa.Column("found_at", MOMENT, nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id"], ["bss_study.id"], name=op.f("fk_bss_finding_study_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("study_id", name=op.f("pk_bss_finding")),
    )
    op.create_table(
        "bss_probe",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("measured_at", MOMENT, nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", NUMBER, nullable=True),
        sa.Column("evaluation_seconds", NUMBER, nullable=True),
        sa.Column("steps_timed", sa.BigInteger(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("out_of_memory", sa.Boolean(), nullable=False),
        sa.Column("eval_every_steps", sa.BigInteger(), nullable=True),
        sa.Column("step_seconds_low", NUMBER, nullable=True),
        sa.Column("step_seconds_high", NUMBER, nullable=True),
        sa.Column("undelayed_step_seconds", NUMBER, nullable=True),
        sa.Column("reference_seconds", NUMBER, nullable=True),
        sa.Column("host_bound_share", NUMBER, nullable=True),
        sa.Column("update_seconds", NUMBER, nullable=True),
        sa.Column("settled", sa.Boolean(), nullable=True),
        sa.Column("contended", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("metric", NUMBER, nullable=True),
        sa.Column("noise_scale", NUMBER, nullable=True),
        sa.Column("noise_low", NUMBER, nullable=True),
        sa.Column("noise_high", NUMBER, nullable=True),
        sa.Column("noise_adam_scale", NUMBER, nullable=True),
        sa.Column("noise_adam_low", NUMBER, nullable=True),
        sa.Column("noise_adam_high", NUMBER, nullable=True),
        sa.Column("noise_passes", sa.BigInteger(), nullable=True),
        sa.Column("noise_trace", NUMBER, nullable=True),
        sa.Column("noise_square", NUMBER, nullable=True),
        sa.Column("noise_adam_trace", NUMBER, nullable=True),
        sa.Column("noise_adam_square", NUMBER, nullable=True),
        sa.Column("noise_seconds", NUMBER, nullable=True),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_bss_probe_batch_size_positive")),
        sa.CheckConstraint("eval_every_steps > 0", name=op.f("ck_bss_probe_eval_every_steps_positive")),
        sa.CheckConstraint("evaluation_seconds >= 0", name=op.f("ck_bss_probe_evaluation_seconds_not_negative")),
        sa.CheckConstraint(
            "host_bound_share >= 0 AND host_bound_share <= 1", name=op.f("ck_bss_probe_host_bound_share_share")
        ),
        sa.CheckConstraint("micro_batch_size > 0", name=op.f("ck_bss_probe_micro_batch_size_positive")),
        sa.CheckConstraint("noise_passes >= 0", name=op.f("ck_bss_probe_noise_passes_not_negative")),
        sa.CheckConstraint("noise_seconds >= 0", name=op.f("ck_bss_probe_noise_seconds_not_negative")),
        sa.CheckConstraint("step >= 0", name=op.f("ck_bss_probe_step_not_negative")),
        sa.CheckConstraint("step_seconds > 0", name=op.f("ck_bss_probe_step_seconds_positive")),
        sa.CheckConstraint("steps_timed >= 0", name=op.f("ck_bss_probe_steps_timed_not_negative")),
        sa.CheckConstraint("update_seconds >= 0", name=op.f("ck_bss_probe_update_seconds_not_negative")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_probe_environment_id"), ondelete="RESTRICT"
        ),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_probe_study_id"), ondelete="CASCADE"),
        sa.CheckConstraint("kind IN ('memory', 'step_time', 'noise_scale')", name=op.f("ck_bss_probe_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_probe")),
        sa.UniqueConstraint(
            "study_id", "environment_id", "kind", "batch_size", "micro_batch_size", name="uq_bss_probe_measurement"
        ),
    )
    op.create_index(op.f("ix_bss_probe_environment_id"), "bss_probe", ["environment_id"], unique=False)
    op.create_table(
        "bss_spec",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_spec_study_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "digest", name=op.f("pk_bss_spec")),
    )
    op.create_table(
        "bss_trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("uncapped", sa.Boolean(), nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("learning_rate", NUMBER, nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("accumulation_steps", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("warmup_epochs", NUMBER, nullable=False),
        sa.Column("weight_decay", NUMBER, nullable=False),
        sa.Column("dropout", NUMBER, nullable=False),
        sa.Column("label_smoothing", NUMBER, nullable=False),
        sa.Column("optimizer", sa.Text(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("sampled", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds_limit", NUMBER, nullable=False),
        sa.Column("eval_every_steps", sa.BigInteger(), nullable=False),
        sa.Column("threads", sa.BigInteger(), nullable=False),
        sa.Column("retry_of", sa.BigInteger(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", MOMENT, nullable=True),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("ended_at", MOMENT, nullable=True),
        sa.Column("steps_x_step_time_s", NUMBER, nullable=True),
        sa.Column("expected_improvement", NUMBER, nullable=True),
        sa.Column("started_by", sa.Text(), nullable=True),
        sa.Column("plan_id", sa.Text(), nullable=True),
        sa.Column("spec_digest", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("train_seconds", NUMBER, nullable=False),
        sa.Column("undelayed_train_seconds", NUMBER, nullable=True),
        sa.Column("reference_seconds", NUMBER, nullable=True),
        sa.Column("host_bound_share", NUMBER, nullable=True),
        sa.Column("evaluation_seconds", NUMBER, nullable=False),
        sa.Column("warmup_seconds", NUMBER, nullable=False),
        sa.Column("other_seconds", NUMBER, nullable=False),
        sa.Column("wall_seconds", NUMBER, nullable=False),
        sa.Column("time_to_target_s", NUMBER, nullable=True),
        sa.Column("steps_to_target", sa.BigInteger(), nullable=True),
        sa.Column("last_miss_step", sa.BigInteger(), nullable=True),
        sa.Column("last_miss_seconds", NUMBER, nullable=True),
        sa.Column("first_hit_step", sa.BigInteger(), nullable=True),
        sa.Column("first_hit_seconds", NUMBER, nullable=True),
        sa.Column("final_metric", NUMBER, nullable=True),
        sa.Column("best_metric", NUMBER, nullable=True),
        sa.Column("test_metric", NUMBER, nullable=True),
        sa.Column("further_test_metrics", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column(
            "peak_memory_basis",
            sa.Enum(
                "device",
                "resident",
                "resident_sampled",
                name="peak_memory_basis",
                native_enum=False,
                create_constraint=True,
            ),
            nullable=True,
        ),
        sa.Column("dropped_samples_per_epoch", sa.BigInteger(), nullable=True),
        sa.Column("contended", sa.Boolean(), nullable=False),
        sa.Column("skipped_steps", sa.BigInteger(), nullable=True),
        sa.Column("data_placement", sa.Text(), nullable=True),
        sa.Column("data_seconds", NUMBER, nullable=True),
        sa.Column("seconds_basis", sa.String(16), nullable=True),
        sa.Column("warnings", sa.Text(), server_default="", nullable=False),
        sa.Column("traceback", sa.Text(), nullable=True),
        sa.Column("energy_joules", NUMBER, nullable=True),
        sa.Column("mean_power_watts", NUMBER, nullable=True),
        sa.Column("mean_clock_mhz", NUMBER, nullable=True),
        sa.Column("throttle_reasons", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("device_uuid", sa.Text(), nullable=True),
        sa.Column("noise_scale", NUMBER, nullable=True),
        sa.Column("noise_low", NUMBER, nullable=True),
        sa.Column("noise_high", NUMBER, nullable=True),
        sa.Column("noise_adam_scale", NUMBER, nullable=True),
        sa.Column("noise_adam_low", NUMBER, nullable=True),
        sa.Column("noise_adam_high", NUMBER, nullable=True),
        sa.Column("noise_passes", sa.BigInteger(), nullable=True),
        sa.Column("noise_trace", NUMBER, nullable=True),
        sa.Column("noise_square", NUMBER, nullable=True),
        sa.Column("noise_adam_trace", NUMBER, nullable=True),
        sa.Column("noise_adam_square", NUMBER, nullable=True),
        sa.Column("noise_seconds", NUMBER, nullable=True),
        sa.CheckConstraint(
            "(ended_at IS NULL) = (state IN ('queued', 'running'))", name=op.f("ck_bss_trial_ended_at_when_finished")
        ),
        sa.CheckConstraint(
            "state <> 'running' OR (lease_owner IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name=op.f("ck_bss_trial_lease_when_running"),
        ),
        sa.CheckConstraint(
            "state = 'queued' OR environment_id IS NOT NULL", name=op.f("ck_bss_trial_environment_when_started")
        ),
        sa.CheckConstraint("retry_of < number", name=op.f("ck_bss_trial_retry_of_earlier")),
        sa.CheckConstraint(
            "time_to_target_s IS NULL OR state = 'reached'", name=op.f("ck_bss_trial_time_to_target_s_when_reached")
        ),
        sa.CheckConstraint("accumulation_steps > 0", name=op.f("ck_bss_trial_accumulation_steps_positive")),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_bss_trial_batch_size_positive")),
        sa.CheckConstraint("data_seconds >= 0", name=op.f("ck_bss_trial_data_seconds_not_negative")),
        sa.CheckConstraint("dropout >= 0 AND dropout < 1", name=op.f("ck_bss_trial_dropout_share")),
        sa.CheckConstraint("energy_joules >= 0", name=op.f("ck_bss_trial_energy_joules_not_negative")),
        sa.CheckConstraint("eval_every_steps > 0", name=op.f("ck_bss_trial_eval_every_steps_positive")),
        sa.CheckConstraint("evaluation_seconds >= 0", name=op.f("ck_bss_trial_evaluation_seconds_not_negative")),
        sa.CheckConstraint(
            "host_bound_share >= 0 AND host_bound_share <= 1", name=op.f("ck_bss_trial_host_bound_share_share")
        ),
        sa.CheckConstraint(
            "label_smoothing >= 0 AND label_smoothing < 1", name=op.f("ck_bss_trial_label_smoothing_share")
        ),
        sa.CheckConstraint("learning_rate > 0", name=op.f("ck_bss_trial_learning_rate_positive")),
        sa.CheckConstraint("mean_power_watts >= 0", name=op.f("ck_bss_trial_mean_power_watts_not_negative")),
        sa.CheckConstraint("micro_batch_size > 0", name=op.f("ck_bss_trial_micro_batch_size_positive")),
        sa.CheckConstraint("noise_passes >= 0", name=op.f("ck_bss_trial_noise_passes_not_negative")),
        sa.CheckConstraint("noise_seconds >= 0", name=op.f("ck_bss_trial_noise_seconds_not_negative")),
        sa.CheckConstraint("number > 0", name=op.f("ck_bss_trial_number_positive")),
        sa.CheckConstraint("other_seconds >= 0", name=op.f("ck_bss_trial_other_seconds_not_negative")),
        sa.CheckConstraint("samples >= 0", name=op.f("ck_bss_trial_samples_not_negative")),
        sa.CheckConstraint("skipped_steps >= 0", name=op.f("ck_bss_trial_skipped_steps_not_negative")),
        sa.CheckConstraint("steps >= 0", name=op.f("ck_bss_trial_steps_not_negative")),
        sa.CheckConstraint("steps_to_target >= 0", name=op.f("ck_bss_trial_steps_to_target_not_negative")),
        sa.CheckConstraint("steps_x_step_time_s >= 0", name=op.f("ck_bss_trial_steps_x_step_time_s_not_negative")),
        sa.CheckConstraint("threads > 0", name=op.f("ck_bss_trial_threads_positive")),
        sa.CheckConstraint("time_to_target_s >= 0", name=op.f("ck_bss_trial_time_to_target_s_not_negative")),
        sa.CheckConstraint("tokens >= 0", name=op.f("ck_bss_trial_tokens_not_negative")),
        sa.CheckConstraint("train_seconds >= 0", name=op.f("ck_bss_trial_train_seconds_not_negative")),
        sa.CheckConstraint("train_seconds_limit > 0", name=op.f("ck_bss_trial_train_seconds_limit_positive")),
        sa.CheckConstraint("wall_seconds >= 0", name=op.f("ck_bss_trial_wall_seconds_not_negative")),
        sa.CheckConstraint("warmup_epochs >= 0", name=op.f("ck_bss_trial_warmup_epochs_not_negative")),
        sa.CheckConstraint("warmup_seconds >= 0", name=op.f("ck_bss_trial_warmup_seconds_not_negative")),
        sa.CheckConstraint("weight_decay >= 0", name=op.f("ck_bss_trial_weight_decay_not_negative")),
        sa.CheckConstraint("world_size > 0", name=op.f("ck_bss_trial_world_size_positive")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_trial_environment_id"), ondelete="RESTRICT"
        ),
        sa.ForeignKeyConstraint(
            ["study_id", "retry_of"],
            ["bss_trial.study_id", "bss_trial.number"],
            name="fk_bss_trial_retry_of",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_trial_study_id"), ondelete="CASCADE"),
        sa.CheckConstraint(
            f"state IN ({TRIAL_STATES})",
            name=op.f("ck_bss_trial_state"),
        ),
        sa.CheckConstraint(
            "phase IN ('search', 'confirm', 'audit', 'to_budget', 'growth', 'probe')", name=op.f("ck_bss_trial_phase")
        ),
        sa.CheckConstraint("seconds_basis IN ('reported', 'wall')", name=op.f("ck_bss_trial_seconds_basis")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_trial")),
        sa.UniqueConstraint("study_id", "number", name=op.f("uq_bss_trial_study_id_number")),
        sa.UniqueConstraint("plan_id", name=op.f("uq_bss_trial_plan_id")),
    )
    op.create_index(op.f("ix_bss_trial_environment_id"), "bss_trial", ["environment_id"], unique=False)
    op.create_index(op.f("ix_bss_trial_study_id_retry_of"), "bss_trial", ["study_id", "retry_of"], unique=False)
    op.create_index(op.f("ix_bss_trial_study_id_revision"), "bss_trial", ["study_id", "revision"], unique=False)
    op.create_index(op.f("ix_bss_trial_study_id_state"), "bss_trial", ["study_id", "state"], unique=False)
    op.create_table(
        "bss_visit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("visit", sa.BigInteger(), nullable=False),
        sa.Column("measured_at", MOMENT, nullable=False),
        sa.Column("batch_size", sa.BigInteger(), nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", NUMBER, nullable=False),
        sa.Column("step_seconds_low", NUMBER, nullable=True),
        sa.Column("step_seconds_high", NUMBER, nullable=True),
        sa.Column("undelayed_step_seconds", NUMBER, nullable=True),
        sa.Column("reference_seconds", NUMBER, nullable=True),
        sa.Column("host_bound_share", NUMBER, nullable=True),
        sa.Column("steps_timed", sa.BigInteger(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=True),
        sa.Column("contended", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.CheckConstraint("batch_size > 0", name=op.f("ck_bss_visit_batch_size_positive")),
        sa.CheckConstraint(
            "host_bound_share >= 0 AND host_bound_share <= 1", name=op.f("ck_bss_visit_host_bound_share_share")
        ),
        sa.CheckConstraint("micro_batch_size > 0", name=op.f("ck_bss_visit_micro_batch_size_positive")),
        sa.CheckConstraint("step_seconds > 0", name=op.f("ck_bss_visit_step_seconds_positive")),
        sa.CheckConstraint("visit > 0", name=op.f("ck_bss_visit_visit_positive")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["bss_environment.id"], name=op.f("fk_bss_visit_environment_id"), ondelete="RESTRICT"
        ),
        sa.ForeignKeyConstraint(["study_id"], ["bss_study.id"], name=op.f("fk_bss_visit_study_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bss_visit")),
        sa.UniqueConstraint(
            "study_id", "environment_id", "visit", "batch_size", "micro_batch_size", name="uq_bss_visit_measurement"
        ),
    )
    op.create_index(op.f("ix_bss_visit_environment_id"), "bss_visit", ["environment_id"], unique=False)
    op.create_table(
        "bss_log",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["bss_trial.id"], name=op.f("fk_bss_log_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_bss_log")),
    )
    op.create_table(
        "bss_observation",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds", NUMBER, nullable=False),
        sa.Column("metric", NUMBER, nullable=False),
        sa.Column("loss", NUMBER, nullable=True),
        sa.Column("learning_rate", NUMBER, nullable=False),
        sa.CheckConstraint("samples >= 0", name=op.f("ck_bss_observation_samples_not_negative")),
        sa.CheckConstraint("step >= 0", name=op.f("ck_bss_observation_step_not_negative")),
        sa.CheckConstraint("train_seconds >= 0", name=op.f("ck_bss_observation_train_seconds_not_negative")),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["bss_trial.id"], name=op.f("fk_bss_observation_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trial_id", "step", name=op.f("pk_bss_observation")),
    )
    if op.get_bind().dialect.name == "postgresql":
        for statement in POSTGRESQL:
            op.execute(statement)


def downgrade() -> None:
    for table in (
        "bss_observation",
        "bss_log",
        "bss_visit",
        "bss_trial",
        "bss_spec",
        "bss_probe",
        "bss_finding",
        "bss_claim",
        "bss_branch",
        "bss_study",
        "bss_worker",
        "bss_submission",
        "bss_environment",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION bss_check_submitter()")
        op.execute("DROP FUNCTION bss_check_maker()")
