//! Every code that a fault can have: its stable text, its kind, what it means and what to do about it.
//!
//! What must hold: a text, once released, keeps its meaning, because programs compare it; and a code has one kind, so that every
//! API answers it with one status. The table below is the only place where codes are made. `docs/errors.md` is written from it.

use std::fmt;

use crate::FaultKind;

macro_rules! codes {
    ($($section:literal { $($name:ident $kind:ident $text:literal $meaning:literal $remedy:literal;)+ })+) => {
        /// The machine-readable name of what was refused or went wrong.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code {
            $($(#[doc = $meaning] $name,)+)+
        }

        impl Code {
            /// All of them, in sections, in the order of the table.
            pub const SECTIONS: &'static [(&'static str, &'static [Code])] =
                &[$(($section, &[$(Code::$name),+])),+];

            /// As it stands on every wire.
            pub const fn text(self) -> &'static str {
                match self { $($(Self::$name => $text,)+)+ }
            }

            pub const fn kind(self) -> FaultKind {
                match self { $($(Self::$name => FaultKind::$kind,)+)+ }
            }

            /// What happened, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $($(Self::$name => $meaning,)+)+ }
            }

            /// What to do about it, in one sentence.
            pub const fn remedy(self) -> &'static str {
                match self { $($(Self::$name => $remedy,)+)+ }
            }
        }
    };
}

codes! {
    "Requests" {
        NoSuchRoute NotFound "no_such_route" "No API of this server has such a path."
            "Compare the path with the API's document, `/openapi.json`.";
        MethodNotAllowed Invalid "method_not_allowed" "The path exists, but cannot be asked for with this method."
            "Use a method that the API's document names.";
        AmbiguousHost Invalid "ambiguous_host" "The request names no host, or more than one."
            "Send exactly one `Host`.";
        InvalidUri Invalid "invalid_uri" "The path cannot be passed on to a sandbox's port."
            "Send a path that is valid in HTTP.";
        InvalidRequest Invalid "invalid_request" "An argument of a request to the workflow engine is not valid."
            "Correct what the message names.";
        InvalidPathParameter Invalid "invalid_path_parameter" "A part of the path is not what the route expects there."
            "Correct the id or number in the path.";
        InvalidQuery Invalid "invalid_query" "A query parameter is unknown, given twice, or has a value that it cannot have."
            "Correct or leave out the parameter that the message names.";
        InvalidHeader Invalid "invalid_header" "A header has a value that it cannot have."
            "Correct or leave out the header that the message names.";
        InvalidBody Invalid "invalid_body" "The body is not the JSON that the route reads."
            "Correct the field that the message names; the API's document has the schema.";
        InvalidMessage Invalid "invalid_message" "A message on a WebSocket is not one that is expected there."
            "Send the messages that the API's document describes, in their order.";
        InvalidTime Invalid "invalid_time" "A field is not a time."
            "Write RFC 3339, such as `2030-01-31T12:00:00Z`.";
        InvalidDate Invalid "invalid_date" "A field is not a date."
            "Write it as `2030-01-31`.";
        InvalidId Invalid "invalid_id" "A field is not an id of the kind that is expected there."
            "Give the id as it was answered when the thing was made.";
        InvalidBase64 Invalid "invalid_base64" "A field that ends in `_base64` is not base64."
            "Encode it in the standard alphabet, with padding.";
        InvalidMode Invalid "invalid_mode" "A file mode is not one."
            "Write octal digits up to 7777, such as `0644`.";
        InvalidSignal Invalid "invalid_signal" "A signal's name or number is not known."
            "Give a number from 1 to 64 or a name such as `SIGTERM`.";
        InvalidIdempotencyKey Invalid "invalid_idempotency_key" "The header `Idempotency-Key` cannot be read."
            "Send 1 to 255 visible ASCII characters.";
        IdempotencyKeyInvalid Invalid "idempotency_key_invalid"
            "The idempotency key is empty, too long, or holds what cannot be printed."
            "Use 1 to 256 printable characters.";
        IdempotencyKeyWithInput Invalid "idempotency_key_with_input"
            "A command that reads input or has a terminal cannot be started once by a key."
            "Leave out the idempotency key, or the input and the terminal.";
        IdempotencyConflict Conflict "idempotency_conflict" "The idempotency key was used before, for another request."
            "Use a new key for a new request.";
        MissingField Invalid "missing_field" "A field that the request needs is missing."
            "Give the field that the message names.";
        ContradictingFields Invalid "contradicting_fields" "Two fields of the request exclude each other."
            "Give one of the two.";
        OutOfRange Invalid "out_of_range" "A number or a length is outside of what is allowed."
            "Use a value in the range that the message names.";
        CursorInvalid Invalid "cursor_invalid" "The cursor is not one that this list answered."
            "Begin without a cursor, and pass on each answer's own.";
        InvalidCursor Invalid "invalid_cursor" "The cursor is not one that this list of model calls answered."
            "Begin without a cursor, and pass on each answer's own.";
        TooManyLabels Invalid "too_many_labels" "A list is narrowed by more labels than allowed."
            "Ask with fewer labels.";
        UnsupportedMediaType Invalid "unsupported_media_type" "The body is not declared as what the route reads."
            "Send `Content-Type: application/json`.";
        WebsocketRequired Invalid "websocket_required" "The route speaks WebSocket, and the request does not ask for it."
            "Connect with a WebSocket client.";
        RangeNotSatisfiable Invalid "range_not_satisfiable" "The file has no bytes in the range that was asked for."
            "Ask for a range inside the size that `Content-Range` names.";
        IncompleteBody Invalid "incomplete_body" "The body broke off before its end."
            "Send the request again.";
        BodyBroken Invalid "body_broken" "The body of an upload could not be read to its end."
            "Send the upload again.";
        UploadBrokeOff Invalid "upload_broke_off" "An upload ended before its end; nothing of it was kept."
            "Send the upload again.";
        BodyTooLarge TooLarge "body_too_large" "The body has more bytes than the route accepts."
            "Send less, or send it in parts.";
        RequestTooLarge TooLarge "request_too_large" "The request has more bytes than can be passed on."
            "Make the request smaller.";
        BodyTooSlow TimedOut "body_too_slow" "The body came too slowly, or paused for too long."
            "Send the whole body at once.";
        NoMessage TimedOut "no_message" "The client connected but did not say in time what to run."
            "Send the first message at once after connecting.";
        TimedOut TimedOut "timed_out" "The workflow engine did not answer in the time that the request allows."
            "Ask again, or allow more time.";
    }
    "Keys and projects" {
        MissingKey Unauthenticated "missing_key" "The request carries no API key."
            "Send `Authorization: Bearer e2b_…`; `atoll key create` makes a key.";
        InvalidKey Unauthenticated "invalid_key" "The key is unknown, of the wrong kind for this route, revoked or expired."
            "Send a key that is valid here; `atoll key create` makes one.";
        InvalidPortToken Unauthenticated "invalid_port_token" "The token does not open this port of this sandbox."
            "Ask for a link to the port with `atoll port`.";
        Forbidden Forbidden "forbidden" "The key may not do this in the workflow engine."
            "Use a key of the project that the namespace belongs to.";
        OperatorsOnly Forbidden "operators_only" "Only a key with the role operator may do this."
            "Use a key of the project `default` with the role operator.";
        NotAllowed Forbidden "not_allowed" "The role or the scopes of the key do not allow this, or what was sent is not a key."
            "Use a key that allows it; `atoll key create --role --scope` makes one.";
        RoleInvalid Invalid "role_invalid" "A role is not one, or not one that keys of this project can have."
            "Use `operator` (in the project `default`), `member`, `viewer` or `approver`.";
        ScopeInvalid Invalid "scope_invalid" "A scope is not one."
            "Use the scopes that the message names.";
        KeyScopesInvalid Invalid "key_scopes_invalid" "A key has too many scopes."
            "Use fewer, or a wider one.";
        TooManySecrets LimitExceeded "too_many_secrets" "The project has as many secrets as it may have, or as long ones."
            "Delete secrets that nobody uses.";
        TooManyKeys LimitExceeded "too_many_keys" "The project has as many keys that work as it may have."
            "Revoke keys that nobody uses (`atoll key list` lists them), or give them an expiry.";
        KeyExpiryInvalid Invalid "key_expiry_invalid" "A key would expire at a time that is past."
            "Give a time in the future, or none.";
        InvalidSession Unauthenticated "invalid_session" "The session of the browser is unknown or over."
            "Begin a new one with `POST /v1/session` and a key.";
        WrongOrigin Forbidden "wrong_origin" "A browser's session was used by a page that is not of this server, or that does not say."
            "Use the session from the server's own pages; programs send a key.";
        WrongCsrf Forbidden "wrong_csrf" "A change in a browser's session came without the session's CSRF token."
            "Send `csrf` of what `GET /v1/session` answers as `X-Atoll-CSRF`.";
        NoSession Invalid "no_session" "The request came with a key, and not in the session of a browser."
            "`POST /v1/session` begins a session.";
        KeyNameInvalid Invalid "key_name_invalid" "A key's name is empty, too long, or holds what it must not."
            "Use a short name of printable characters.";
        KeyNotFound NotFound "key_not_found" "There is no such key in this project."
            "`atoll key list` shows those that exist.";
        ProjectExists Conflict "project_exists" "There is a project of this name already."
            "Choose another name.";
        ProjectNameInvalid Invalid "project_name_invalid" "A project's name is not one."
            "Use the characters and length that the message names.";
        ProjectNotFound NotFound "project_not_found" "There is no project of this name."
            "`atoll project list` shows those that exist.";
        NameTaken Conflict "name_taken" "Another thing of the same kind in this project has this name."
            "Choose another name.";
        NameInvalid Invalid "name_invalid" "A name is empty, too long, or holds characters that it must not."
            "Use the characters and length that the message names.";
    }
    "The server's load and limits" {
        TooManyConnections LimitExceeded "too_many_connections" "A project, sandbox or key has as many connections as it may have."
            "Close some, or use one for several requests.";
        ServerCrowded LimitExceeded "server_crowded"
            "The server keeps its last connections for projects that have fewer than this one."
            "Close some, or use one for several requests.";
        TooMuchBuffered LimitExceeded "too_much_buffered"
            "Requests and answers of this caller on their way hold all the memory that they may."
            "Read answers that are waiting, or send fewer requests at a time.";
        TooManyUploads Unavailable "too_many_uploads" "As many uploads, or transfers of volumes and snapshots, as may be at a time are under way."
            "Try again when one of them has ended.";
        TooManyTemplates LimitExceeded "too_many_templates"
            "The project has as many templates, names of them and cached steps of builds as it may have."
            "Delete templates, or prune them (`atoll template prune`), which removes those without a name and what is cached.";
        TooManyBuilds Unavailable "too_many_builds"
            "As many templates as the project, or the server, builds at a time are being built."
            "Try again when one of them is done.";
        ServerBusy Unavailable "server_busy" "The server has no memory or connection left for this request now."
            "Try again in a moment.";
        ServerStopping Unavailable "server_stopping" "The server is stopping and begins nothing new."
            "Try again when it is back.";
        ServerDiskFull Unavailable "server_disk_full" "The disk of the server is full; nothing was changed."
            "Free space on the server (`atoll gc`) and try again.";
        StorageQuotaExceeded LimitExceeded "storage_quota_exceeded" "The project keeps as many bytes as it may keep."
            "Delete snapshots, volumes, artifacts or templates, or have the operator raise the limit.";
        Unavailable Unavailable "unavailable" "The workflow engine cannot answer now."
            "Try again in a moment.";
        Internal Internal "internal" "A mistake of the server's own."
            "Look at the server's log under the request's id, and report it.";
    }
    "Sandboxes" {
        SandboxNotFound NotFound "sandbox_not_found" "There is no such sandbox in this project."
            "`atoll ls --all` shows those that exist or existed lately.";
        SandboxDeleted Gone "sandbox_deleted" "The sandbox was deleted."
            "Create a new one.";
        SandboxFailed Gone "sandbox_failed" "The sandbox could not be started or kept, and is gone."
            "Look at its end reason (`atoll inspect`), and create a new one.";
        SandboxEnded Gone "sandbox_ended" "The sandbox ended during the operation."
            "Look at its end reason (`atoll inspect`), and create a new one.";
        SandboxOutOfMemory Gone "sandbox_out_of_memory"
            "The sandbox used more memory than it has, and was ended during the operation."
            "Create one with more memory.";
        SandboxPaused Conflict "sandbox_paused" "The sandbox is paused, or was paused during the operation."
            "Resume it, then do it again.";
        ResumeFailed GuestFailed "resume_failed" "The sandbox ended while it was being resumed, and rests as before."
            "Resume it again.";
        SandboxStopped Conflict "sandbox_stopped" "The sandbox is stopped, or was stopped during the operation."
            "Start it, then do it again.";
        SandboxWrongState Conflict "sandbox_wrong_state" "The state of the sandbox does not allow this now."
            "Wait for the state that the hint names.";
        SandboxContended Conflict "sandbox_contended" "Others change the sandbox at the same time."
            "Let one client decide when it rests.";
        SandboxStarting Unavailable "sandbox_starting" "The sandbox is just being created."
            "Try again in a moment.";
        SandboxBusy LimitExceeded "sandbox_busy" "The sandbox does as much at a time as it may."
            "Wait until some of its commands or transfers have ended.";
        KillInProgress Unavailable "kill_in_progress" "The sandbox is being deleted, and the host has not let go of it yet."
            "Ask again in a moment.";
        StartFailed Unavailable "start_failed"
            "The sandbox that another request with the same idempotency key began could not be started."
            "Send the request again.";
        TooManySandboxes LimitExceeded "too_many_sandboxes"
            "The project has as many sandboxes as it may have, among which each build that goes on counts as one."
            "Kill those that are no longer needed, or have the operator raise the limit.";
        IsolationUnavailable Unsupported "isolation_unavailable"
            "No isolation tier at or above the one asked for works on this machine."
            "`atoll doctor` says what is missing; or ask for a weaker tier.";
        ResourcesOutOfRange Invalid "resources_out_of_range" "CPU, memory or disk are outside of what this server allows."
            "Ask for values in the range that the message names.";
        TimeoutOutOfRange Invalid "timeout_out_of_range" "The timeout is outside of what this server allows."
            "Ask for one in the range that the message names.";
        IdleOutOfRange Invalid "idle_out_of_range" "The idle time is below the minimum."
            "Ask for at least what the message names.";
        RetentionOutOfRange Invalid "retention_out_of_range" "The retention would delete the sandbox as soon as it rests."
            "Ask for a longer retention, or leave it out.";
        OwnerInvalid Invalid "owner_invalid" "What is given as the owner of a sandbox is none, or cannot be chosen."
            "Name a workflow's run or a living sandbox, as the message says.";
        LabelInvalid Invalid "label_invalid" "A label's name or value is not valid."
            "Use the characters and length that the message names.";
        LabelsTooMany Invalid "labels_too_many" "A sandbox is given more labels than allowed."
            "Give fewer labels.";
        EnvInvalid Invalid "env_invalid" "The name or value of an environment variable is not valid."
            "Use letters, digits and `_` in names, and no NUL in values.";
        EnvTooMany Invalid "env_too_many" "There are more environment variables than allowed."
            "Write values to a file in the sandbox.";
        EnvTooLarge Invalid "env_too_large" "The environment has more bytes than allowed."
            "Write large values to a file in the sandbox.";
        HookInvalid Invalid "hook_invalid" "A hook cannot be run as it is written."
            "Correct what the message names.";
        HooksTooMany Invalid "hooks_too_many" "A sandbox is given more hooks than allowed."
            "Put several commands into one hook.";
        HookFailed GuestFailed "hook_failed" "A hook failed, and the sandbox was removed."
            "Run the hook by hand in a sandbox without it to see more.";
        ForkCountInvalid Invalid "fork_count_invalid" "A fork is asked for no copy, or for more than allowed."
            "Ask for a number in the range that the message names.";
        GuestUnreachable GuestFailed "guest_unreachable" "The agent in the sandbox does not answer."
            "Something in the sandbox has stopped it: kill the sandbox.";
        GuestProtocolViolation GuestFailed "guest_protocol_violation"
            "The agent in the sandbox answered with what its protocol does not allow."
            "Something in the sandbox has taken it over: kill the sandbox.";
        GuestProtocol GuestFailed "guest_protocol" "The output of a command came from the sandbox in a form that it cannot have."
            "Something in the sandbox has taken over its agent: kill the sandbox.";
        RuntimeFailed Internal "runtime_failed" "The program that isolates the sandbox failed."
            "Look at the server's log; `atoll doctor` says whether the machine is fit.";
    }
    "Commands" {
        CommandNotFound NotFound "command_not_found" "There is no such command in the sandbox."
            "List the sandbox's commands; those that ended long ago are forgotten.";
        CommandBegins LimitExceeded "command_begins" "Another request with the same idempotency key is just starting the command."
            "Ask again in a moment.";
        ArgvEmpty Invalid "argv_empty" "The command has no program to run."
            "Name at least a program.";
        SignalInvalid Invalid "signal_invalid" "The number is not a signal."
            "Use a number from 1 to 64.";
        InvalidInSandbox Invalid "invalid_in_sandbox" "The sandbox's system refuses the operation as it stands."
            "Correct what the message names.";
        NotFoundInSandbox NotFound "not_found_in_sandbox" "A file, program or command does not exist in the sandbox."
            "Look at what the message names.";
        NoSuchUserInSandbox Invalid "no_such_user_in_sandbox" "The sandbox has no user of this name."
            "Name a user of its `/etc/passwd`, such as `root`, or a number.";
        PermissionDeniedInSandbox Forbidden "permission_denied_in_sandbox" "The user inside the sandbox may not do this."
            "Do it as another user, such as `root`.";
        UnsupportedInSandbox Unsupported "unsupported_in_sandbox" "The sandbox's system or filesystem cannot do this."
            "Do it another way, or on another isolation tier.";
        IoErrorInSandbox GuestFailed "io_error_in_sandbox" "The sandbox's system failed to read or write."
            "Try again; if it stays, create a new sandbox.";
    }
    "Files" {
        AlreadyExists Conflict "already_exists" "Something of this name is there already."
            "Choose another name, or remove what is there.";
        NotADirectory Invalid "not_a_directory" "A part of the path is not a directory."
            "Correct the path.";
        IsADirectory Invalid "is_a_directory" "The path leads to a directory, where a file is needed."
            "Name a file, or use the operation for directories.";
        NotAFile Invalid "not_a_file" "The path leads to neither a file nor a directory."
            "Name a file or a directory.";
        DirectoryNotEmpty Conflict "directory_not_empty" "The directory is not empty."
            "Remove what is in it first, or remove it with what is in it.";
        DiskFull LimitExceeded "disk_full" "The disk of the sandbox, or the volume, is full."
            "Remove files, or create it with a larger disk.";
        TooLarge TooLarge "too_large" "What is to be read or saved is larger than can be."
            "Make it smaller, or split it.";
        DepthInvalid Invalid "depth_invalid" "A listing of no depth was asked for."
            "Use a depth of at least 1.";
        ListingTooLarge TooLarge "listing_too_large" "The listing has more entries than can be answered at once."
            "List fewer levels, or single directories.";
        PathInvalid Invalid "path_invalid" "The path cannot be used in a volume."
            "Use a path without `..` that begins with `/`.";
        PathNotFound NotFound "path_not_found" "There is nothing at this path of the volume."
            "List the directory above it.";
        ArchiveInvalid Invalid "archive_invalid" "The archive cannot be unpacked."
            "Send a tar stream, plain or compressed, that is whole.";
    }
    "Ports" {
        PortInvalid Invalid "port_invalid" "The number is not a port."
            "Use 1 to 65535.";
        NoSuchPort NotFound "no_such_port" "The host name looks like one of a sandbox's ports, but names none."
            "Use the name that `atoll port` shows.";
        PortRefused GuestFailed "port_refused" "Nobody listens on the port inside the sandbox."
            "Start the server in the sandbox, on all addresses.";
        PortTimedOut TimedOut "port_timed_out" "The port inside the sandbox did not accept a connection within 10 seconds."
            "Look at the server in the sandbox: it may be too busy to accept connections.";
        PortBrokeHttp GuestFailed "port_broke_http" "The port inside the sandbox did not answer in HTTP."
            "Look at what listens there.";
        ConnectionRefused GuestFailed "connection_refused" "Nobody listens where the sandbox was asked to connect."
            "Start the server in the sandbox.";
    }
    "Network and secrets" {
        InvalidNetworkPolicy Invalid "invalid_network_policy"
            "A network policy, or the binding of a secret, cannot be used as it is written."
            "Write what the hint says at the place that the message names.";
        NetworkUnavailable Unsupported "network_unavailable" "Sandboxes have no way out on this machine."
            "`atoll doctor` says what is missing; or create the sandbox without a network.";
        NetworkFailed Unavailable "network_failed" "The sandbox could not be given a network."
            "Try again; the server's log says more.";
        EgressDenied Forbidden "egress_denied"
            "A rule of the sandbox's network policy does not allow this request; told inside the sandbox."
            "`atoll net explain` says why; `atoll net set` changes the policy.";
        RequestBroken Invalid "request_broken"
            "The body of a request from inside the sandbox broke off, or is not what its head says."
            "Send the body as it is, with a length or in chunks.";
        RequestTooLong Unavailable "request_too_long"
            "A request from inside the sandbox is too long with the secret that belongs into it."
            "Make its path and query shorter.";
        UpstreamUnreachable Unavailable "upstream_unreachable"
            "The server that a sandbox asked for, and may reach, cannot be reached."
            "Look at that server and the way to it.";
        UpstreamTlsFailed Unavailable "upstream_tls_failed"
            "No trusted TLS connection could be made to the server that a sandbox asked for."
            "Look at that server's certificate.";
        UpstreamFailed Unavailable "upstream_failed" "The server that a sandbox asked for broke HTTP or the connection."
            "Look at that server.";
        UpstreamEncoded Unavailable "upstream_encoded"
            "The server answered in an encoding in which echoes of secrets cannot be looked for."
            "Ask it for an answer that is not compressed.";
        SecretsInvalid Invalid "secrets_invalid" "The secrets that a sandbox is to be given cannot be given so."
            "Correct what the message names.";
        SecretNotFound NotFound "secret_not_found" "There is no such secret in this project."
            "`atoll secret list` shows those that exist.";
        SecretValueInvalid Invalid "secret_value_invalid" "The secret's value is empty or too long."
            "Give a value of the length that the message names.";
        SecretUnusable Internal "secret_unusable" "A stored secret cannot be opened."
            "Start the server with the key that secrets were sealed with, or set the secret anew.";
    }
    "Snapshots and saved state" {
        SnapshotNotFound NotFound "snapshot_not_found" "There is no such snapshot in this project."
            "`atoll snapshot list` shows those that exist.";
        SnapshotBegins LimitExceeded "snapshot_begins" "Another request with the same idempotency key is just taking the snapshot."
            "Ask again in a moment.";
        SnapshotFileInvalid Invalid "snapshot_file_invalid" "The file is not a snapshot, or not whole."
            "Export it again, and see that it arrives whole.";
        SnapshotNeedsTemplate Conflict "snapshot_needs_template" "The snapshot builds on a template that is not here."
            "Build or import the template that the message names.";
        SnapshotNeedsTier Unsupported "snapshot_needs_tier" "The snapshot was saved on an isolation tier that does not work here."
            "`atoll doctor` says what the tier needs.";
        SnapshotNeedsVolumes Conflict "snapshot_needs_volumes"
            "The snapshot's memory was saved with volumes, which do not travel with it."
            "Take one with files only.";
        SnapshotTierTooWeak Conflict "snapshot_tier_too_weak"
            "The snapshot was saved on a weaker isolation tier than is asked for, or than this server gives."
            "Take it of a sandbox on a stronger tier.";
        SnapshotVolumesDiffer Conflict "snapshot_volumes_differ" "Memory comes back only with the volumes that it was saved with."
            "Give the volumes that the message names.";
        SnapshotRuntimeMismatch Conflict "snapshot_runtime_mismatch"
            "It was saved by another version of the runtime than runs here."
            "Use the version that it was saved with.";
        SnapshotCpuMismatch Conflict "snapshot_cpu_mismatch" "It was saved on a CPU with features that this one lacks."
            "Use a machine with a CPU like the one it was saved on.";
        MemoryNotSupported Unsupported "memory_not_supported" "The isolation tier cannot keep memory."
            "Save files, or use a tier that keeps memory.";
        SavedStateDiffers Conflict "saved_state_differs" "The sandbox rests on another kind of saved state than is asked for."
            "Ask for the kind that it rests on, or wake it first.";
        SavedStateLost Gone "saved_state_lost" "What was saved is not there any more."
            "Create a new sandbox; this one cannot come back.";
        SavedStateDamaged Internal "saved_state_damaged" "The file on disk changed since it was saved."
            "Delete the snapshot or sandbox; it cannot come back.";
        VaultFailed Internal "vault_failed" "Saved state could not be read or written."
            "Look at the server's log and at its disk.";
    }
    "Templates" {
        TemplateNotFound NotFound "template_not_found" "There is no such template."
            "`atoll template list` shows those that exist; `atoll template build` makes one.";
        TemplateNameInvalid Invalid "template_name_invalid"
            "A template's name is empty, too long, or holds spaces or control characters."
            "Use 1 to 256 bytes without them.";
        TemplateInUse Conflict "template_in_use" "Something still needs the template."
            "Delete the sandboxes and snapshots that build on it first.";
        TemplateFailed Invalid "template_failed" "The template could not be built or read."
            "Correct what the message names, and build it again.";
        TemplateHasNoStart Invalid "template_has_no_start" "The template has no start command that could be kept running."
            "Build it with one (`--start`).";
        TemplateNotReady TimedOut "template_not_ready" "The template's start command was not ready in time."
            "Look at the command and its ready check, or allow more time.";
        TemplateStartFailed GuestFailed "template_start_failed"
            "The template's start command could not be started or watched in the sandbox."
            "Run the command by hand in a sandbox of the template.";
        NothingToStart Invalid "nothing_to_start" "The image has no command of its own that could be started."
            "Name one (`--start`).";
        InvalidReadyCheck Invalid "invalid_ready_check" "The ready check is not one."
            "Write one of the forms that the message names.";
        NoDockerfile Invalid "no_dockerfile" "The build's context has no Dockerfile that can be read."
            "Name it with `dockerfile=`, relative to the context.";
        InvalidContext Invalid "invalid_context" "The build's context cannot be unpacked."
            "Send a tar stream of files, directories and links.";
        ContextTooLarge TooLarge "context_too_large" "The build's context is larger than the server takes."
            "Leave files out with `.dockerignore`.";
        ImageNotInARegistry Invalid "image_not_in_a_registry" "A login for a registry was given with an image that is in none."
            "Leave out the login, or name an image in a registry.";
        InvalidRegistryLogin Invalid "invalid_registry_login" "The login for a registry is not whole."
            "Give both user and password.";
        MissingRegistry Invalid "missing_registry" "The login does not say which registry it is for."
            "Name the registry (`--registry`).";
    }
    "Volumes and artifacts" {
        VolumeNotFound NotFound "volume_not_found" "There is no such volume in this project."
            "`atoll volume list` shows those that exist.";
        VolumeNameInvalid Invalid "volume_name_invalid" "A volume's name is empty, too long, or holds spaces or control characters."
            "Use 1 to 256 bytes without them.";
        VolumeSizeInvalid Invalid "volume_size_invalid" "The volume's size is outside of what is allowed."
            "Ask for a size in the range that the message names.";
        VolumePathInvalid Invalid "volume_path_invalid" "A volume cannot be mounted at this path."
            "Use an absolute path that the system does not need itself.";
        VolumePathsOverlap Invalid "volume_paths_overlap" "Two volumes would hide each other."
            "Mount them at paths of which none is inside the other.";
        VolumesTooMany Invalid "volumes_too_many" "A sandbox is given more volumes than allowed."
            "Give fewer volumes.";
        VolumeInUse Conflict "volume_in_use" "The volume is in use."
            "Kill the sandboxes that were created with it first; paused ones count.";
        VolumeReadOnly Conflict "volume_read_only" "The volume is sealed and cannot be written to."
            "Make a new volume.";
        VolumeLost Gone "volume_lost" "The volume's files are not there any more."
            "Delete the volume, and make a new one.";
        VolumeDamaged Internal "volume_damaged"
            "The volume's filesystem is damaged, and cannot be repaired without losing something."
            "Look at it with `e2fsck`.";
        VolumeFailed Internal "volume_failed" "The volume could not be made, mounted, read or written."
            "Look at the server's log.";
        ArtifactNotFound NotFound "artifact_not_found" "There is no such artifact in this project."
            "`atoll artifact list` shows those that exist.";
        ArtifactNameInvalid Invalid "artifact_name_invalid" "An artifact's name is not one."
            "Use 1 to 200 letters, digits, `.`, `_` and `-`, and do not begin with `art_`.";
        ArtifactTooLarge TooLarge "artifact_too_large" "The artifact is larger than artifacts may be."
            "Save less, or compress it.";
    }
    "Models" {
        ModelMissing Invalid "model_missing" "The request names no model."
            "Name one in `model`.";
        ModelNotFound NotFound "model_not_found" "No provider serves a model of this name."
            "`atoll model list` shows what can be called; `provider/model` names one directly.";
        ModelNotAllowed Forbidden "model_not_allowed" "The key may not ask for this model."
            "Ask for one that the hint names, or use another key.";
        ModelBlocked Forbidden "model_blocked" "A guard of the project blocks the model."
            "`atoll model guard` shows what is guarded against.";
        ModelUnpriced Forbidden "model_unpriced" "The model has no price, so no budget can hold against it."
            "`atoll model price set` gives it one; 0 is a price.";
        FieldUnpriced Forbidden "field_unpriced"
            "A field of the request has costs that are not known, so no budget can hold against it."
            "Leave the field out, or use a key without a budget.";
        ModelNameInvalid Invalid "model_name_invalid" "A model's name or pattern is not one."
            "Name the model as its provider does.";
        InputTooLarge TooLarge "input_too_large" "The request has more tokens than a guard of the project allows."
            "Send less; `atoll model guard` shows the limit.";
        GuardRefused Forbidden "guard_refused" "The request holds what a guard of the project does not let pass."
            "Leave it out; `atoll model guard` shows what is guarded against.";
        GuardTooSlow Forbidden "guard_too_slow" "Looking through the request with the project's guards takes too long, or makes it too long."
            "Send less at once, or make the project's own patterns simpler.";
        GuardsUnusable Unavailable "guards_unusable" "The guards that the project has set cannot be used any more, so none of its calls goes out."
            "Set them anew with `atoll model guard set`.";
        GuardsInvalid Invalid "guards_invalid" "The guards cannot be used as they are written."
            "Correct what the message names.";
        BudgetExhausted LimitExceeded "budget_exhausted" "A budget does not allow the call."
            "Ask for fewer tokens, use a cheaper model, or raise the budget with `atoll budget set`.";
        BudgetUnknown Unavailable "budget_unknown" "What was spent of a budget is not known yet, so calls under it wait."
            "Try again in a moment; the server's log says if that cannot be read.";
        BudgetInvalid Invalid "budget_invalid" "A budget cannot be set as it is written."
            "Correct what the message names.";
        SubjectAmbiguous Invalid "subject_ambiguous" "The name of who the budget is for is the name of several."
            "Name it by its id.";
        SubjectNotFound NotFound "subject_not_found" "Who the budget is for does not exist in this project."
            "`atoll model key list` and `atoll ls` show who exists.";
        RateLimited LimitExceeded "rate_limited" "The key has made as many calls as it may in this time."
            "Wait as long as `Retry-After` says.";
        KeyModelsInvalid Invalid "key_models_invalid" "A key's list of models is empty or too long."
            "Name as many as the message allows, or leave the list out.";
        KeyRateInvalid Invalid "key_rate_invalid" "A key's rate limit is not one."
            "Use a number in the range that the message names.";
        PriceInvalid Invalid "price_invalid" "A price is not one."
            "Write dollars for a million tokens, such as `2.50`.";
        RouteEmpty Invalid "route_empty" "A name that stands for models names none."
            "Name at least one model.";
        RouteTooLong Invalid "route_too_long" "A name stands for more models than allowed."
            "Name at most as many as the message allows.";
        SetupTooLarge LimitExceeded "setup_too_large" "The project has as many providers, names of models, prices or budgets as it may have."
            "Delete those that nobody uses.";
        NotFound NotFound "not_found" "There is no such provider, name, price or budget in this project."
            "The `list` command of its kind shows those that exist.";
        CallNotFound NotFound "call_not_found" "There is no such model call in this project."
            "Give the id that the answer named in `x-atoll-call`.";
        Untranslatable Invalid "untranslatable" "A field of the request means nothing to the provider that serves the model."
            "Leave the field out, or call a model of a provider that knows it.";
        ServiceTierUnsupported Invalid "service_tier_unsupported"
            "The service tier has prices of its own that this gateway does not know."
            "Leave `service_tier` out.";
        GatewayOptionInvalid Invalid "gateway_option_invalid" "An option for the gateway is not what it can be."
            "Correct the option that the message names.";
        GatewayOptionUnsupported Invalid "gateway_option_unsupported"
            "An option for the gateway asks for what it cannot promise or does not do."
            "Leave the option out.";
        IdMissing Invalid "id_missing" "The request does not say which generation it asks about."
            "Give `id`.";
        DatesMissing Invalid "dates_missing" "The report needs a first and a last day."
            "Give both.";
        FilterUnsupported Invalid "filter_unsupported" "The report cannot be filtered by this field."
            "Leave the filter out.";
        GroupByUnsupported Invalid "group_by_unsupported" "The report cannot be grouped by this field."
            "Group by a field that the message names, or by none.";
    }
    "Providers of models" {
        ProviderNotFound NotFound "provider_not_found" "There is no such provider in this project."
            "`atoll provider list` shows those that exist.";
        BaseUrlInvalid Invalid "base_url_invalid" "The address of a provider is not one."
            "Write `http://` or `https://`, without a query.";
        BaseUrlMissing Invalid "base_url_missing" "A provider of this kind has no address of its own."
            "Give its address.";
        ProviderKeyInvalid Invalid "provider_key_invalid" "The provider's key is empty or too long."
            "Give the key as the provider shows it.";
        ProviderKeyNeeded Invalid "provider_key_needed"
            "The provider's address or kind changes, and its key does not go to another place unseen."
            "Give the key again.";
        ProviderKeyRefused Unavailable "provider_key_refused" "The provider does not accept the key that this gateway has for it."
            "`atoll provider set` replaces it.";
        ProviderRefused Invalid "provider_refused" "The provider refuses the request as it stands."
            "Correct what the provider's message names.";
        ProviderRefusedSize TooLarge "provider_refused_size" "The request is too large for the provider."
            "Send less.";
        ProviderRateLimited LimitExceeded "provider_rate_limited" "The provider allows no more calls now."
            "Wait as long as `Retry-After` says, or add a fallback.";
        ProviderFailed Unavailable "provider_failed" "The provider could not be reached, failed, or answered what cannot be read."
            "Try again, or add a fallback.";
        ProviderTimedOut TimedOut "provider_timed_out" "The provider did not answer in time."
            "Try again, or add a fallback.";
        ProviderUnusable Unavailable "provider_unusable" "The provider cannot be called as it is configured."
            "Correct it with `atoll provider set`.";
        ProviderResting Unavailable "provider_resting" "The provider has failed too often and is left alone for a moment."
            "Try again in a moment, or add a fallback.";
    }
    "Workflows" {
        WorkflowsOff Unsupported "workflows_off" "The server does not serve workflows."
            "Start it with `--workflows-listen`.";
        WorkflowNotFound NotFound "workflow_not_found" "There is no such workflow, run, schedule or approval."
            "`atoll workflow list` shows those that exist.";
        WorkflowConflict Conflict "workflow_conflict" "The state of the workflow does not allow this now."
            "Look at the workflow, and do what its state allows.";
        WorkflowLimit LimitExceeded "workflow_limit" "A limit of the workflow engine stands in the way."
            "Do less at a time, or make what the message names smaller.";
        NamespaceNotFound NotFound "namespace_not_found" "There is no such namespace."
            "Create it with the client's tools, or use `default`.";
        NamespaceDeleting Conflict "namespace_deleting" "The namespace is being deleted."
            "Wait until everything of it is gone, or use another name.";
        Unsupported Unsupported "unsupported" "The workflow engine does not do this."
            "Do it another way; COMPATIBILITY.md says what is there.";
    }
}

impl Code {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::SECTIONS.iter().flat_map(|(_, codes)| codes.iter().copied())
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_code_is_called_the_same_in_code_and_on_the_wire() {
        let mut seen = HashSet::new();
        for code in Code::all() {
            let mut snake = String::new();
            for c in format!("{code:?}").chars() {
                if c.is_uppercase() && !snake.is_empty() {
                    snake.push('_');
                }
                snake.push(c.to_ascii_lowercase());
            }
            assert_eq!(snake, code.text());
            assert!(seen.insert(code.text()), "{code} stands twice in the table");
        }
    }

    #[test]
    fn meanings_and_remedies_are_sentences() {
        for code in Code::all() {
            for text in [code.meaning(), code.remedy()] {
                let begins = text.starts_with(|c: char| c.is_uppercase() || c == '`');
                assert!(begins && text.ends_with('.'), "{code}: {text}");
            }
        }
    }
}
