"""Names what travels between a client and the plugin of its server.

Work (samples, scores) travels as msgpack, with arrays as bytes (arrays.py): SGLang's own route
would write them as base64 into JSON. What a request for work says (work_request.py) rides on in
`sampling_params.custom_params`; the reply is what SGLang says of the request, and `meta_info` with
the plugin's records. Everything else uses SGLang's routes and JSON.
"""

from __future__ import annotations

from sglang_bridge.columns import DrawColumns, dtypes

WORK_ROUTE = "/bridge/generate"
WORK_TYPE = "application/msgpack"
SCORE_ROUTE = "/bridge/score"  # scores alone, as JSON (score_json.py)
# which start a server is of, open like SGLang's own probe, and which runs it belongs to (claims.py)
PROOF_ROUTE = "/ready/proof"
# what a server that has not sampled its own first token answers there, and to all that would change
# its state (server/starting.py)
STARTING = 503
CHALLENGE = "challenge"
CLAIM_ROUTE = "/bridge/claim"

# request: custom_params
NUM_DRAWS = "bridge_num_draws"  # with NUM_ATOMS, both may be 0: keep a draw cache
NUM_ATOMS = "bridge_num_atoms"
THIN = "bridge_thin"
WANTS_EXPERTS = "bridge_wants_experts"
WANTS_GATES = "bridge_wants_gates"  # with WANTS_EXPERTS
SCORE_RUNS = "bridge_score_runs"  # [2 R]: start and stop of every run
SCORE_LENGTHS = "bridge_score_lengths"  # [T], ids of every row
SCORE_IDS = "bridge_score_ids"  # [N]
SCORE_TEMPERATURE = "bridge_score_temperature"
SCORE_DRAWS = "bridge_score_draws"  # with SCORE_ATOMS, each absent = 0: select besides
SCORE_ATOMS = "bridge_score_atoms"
EXACT = "bridge_exact"  # of a cache or of scores: log-probs as float32
PACKED = "bridge_packed"  # set by the routes of ours alone, which can answer arrays

# reply: meta_info[PAYLOAD]
PAYLOAD = "bridge"
DRAWS = "draws"
SCORES = "scores"
EXPERTS = "experts"

# The arrays of a selection's row table and their types. A row has at most MAX_ATOMS + MAX_DRAWS + 1
# ids: its length, and the path's place in it, fit 16 bits.
ROW_FIELDS: dict[str, str] = {
    "length_T": "<u2",
    "ids_N": "<i4",
    "weight_N": "<f4",
    "logp_N": "<f4",
}
# A draw cache: where its ids are, and the columns that a server records beside them. The log-probs
# may travel in two bytes (arrays.py), those of the path in PATH_LOGP then, exactly.
DRAW_COLUMNS: dict[str, str] = {name: dtype.str for name, dtype in dtypes(DrawColumns).items()}
DRAW_FIELDS: dict[str, str] = {
    "length_T": "<u2",
    "path_T": "<u2",
    "ids_N": "<i4",
    **DRAW_COLUMNS,
}
PATH_LOGP = "path_logp_T"
SELECTION = "selection"  # in a scores payload: a row table of the ids selected from q

# weights_checker: actions; the keys that name a piece of weights have five parts
PIECE_ACTION = "bridge_pieces"
DIGEST_ACTION = "bridge_digests"
STAGED_DIGEST_ACTION = "bridge_staged_digests"
STAGED_ACTION = "bridge_staged"
GPU_ACTION = "bridge_gpu"
GPU = "gpu"  # its answer: weights/device_lane.gpu_of
LOST_ACTION = "bridge_lost"  # its answer: PEER_LOST with the peer's name, or nothing
MODEL_ACTION = "bridge_model"
PROGRESS_ACTION = "bridge_progress"
RUNNING, WAITING = "running", "waiting"  # its answer: JSON of {rid: tokens}, and of [rid]
WORK_ACTION = "bridge_work"
WORK = "work"  # its answer: a ServerWork as JSON (sglang_bridge/work.py)
ENDS = "ends"  # in the answer of MODEL_ACTION: protocol.ServerEnds as JSON
QUANTIZATION, NOT_QUANTISED = "quantization", "none"  # in the answer of MODEL_ACTION
PIECE_SEPARATOR = "|"
# actions with an argument, after a space; a rank that fails answers ERROR alone
EXPECT_ACTION = "bridge_expect"  # a share, see weights/share.py
SAME_HOST_ACTION = "bridge_same_host"  # the group's name, see weights/same_host.py
STAGE_ACTION = "bridge_stage"  # the group's name
RECEIVE_ACTION = "bridge_receive"  # the group's name
# of GPU memory: the argument is tags with a comma between them (server/memory.py)
RELEASE_ACTION = "bridge_release_memory"
RESUME_ACTION = "bridge_resume_memory"
KV_CACHE, WEIGHTS = MEMORY_TAGS = ("kv_cache", "weights")  # SGLang's names
RELEASED, FREED = "released", "freed"  # its answer: tags, see server/memory.py
# of weights on disk: the argument is an Opening as JSON, or a version's name
OPEN_VERSIONS = "bridge_open_versions"
STAGE_VERSION = "bridge_stage_version"
STAGED_VERSION = "bridge_staged_version"
TAKE_VERSION = "bridge_take_version"
CLOSE_VERSIONS = "bridge_close_versions"
RECEIVED_BYTES = "bytes"
PENDING = "pending"  # a rank is not done: ask again
ERROR = "error"
PEER_LOST = "peer_lost"  # beside ERROR: another rank was the cause, by name if it is a server's
