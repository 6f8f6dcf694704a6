//! `beelet gc images` and `beelet gc containers`: removes unused images and dead containers, or lists
//! candidates.

use std::process::ExitCode;

use anyhow::bail;
use beelet_proto::beelet as proto;
use clap::{Args, Subcommand};

use super::args::AgentArgs;
use super::{finish, get::columns::Columns, plain};
use beelet_client::Client;

/// Arguments of `beelet gc`.
#[derive(Debug, Args)]
pub struct GcArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Remove unused images down to the configured thresholds, least recently used first.
    #[command(visible_alias = "image")]
    Images {
        /// Remove all unused images above the minimum age, regardless of disk usage.
        #[arg(long)]
        all_unused: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Remove dead containers and sandboxes beyond the configured numbers.
    #[command(visible_alias = "container")]
    Containers {
        /// Also remove all containers and sandboxes of terminated pods.
        #[arg(long)]
        terminated: bool,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Print the candidates without removing them.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Runs the collection.
#[must_use]
pub fn run(args: &GcArgs) -> ExitCode {
    finish(collect(&args.what))
}

async fn collect(what: &What) -> anyhow::Result<()> {
    match what {
        What::Images { all_unused, common } => {
            let mut client = Client::connect(&common.agent.socket).await?;
            let collected = client.garbage.collect_images(*all_unused, common.dry_run).await?;
            print!("{}", plain::lines(&images(&collected, common.dry_run)));
            if collected.error.is_empty() { Ok(()) } else { bail!("{}", collected.error) }
        }
        What::Containers { terminated, common } => {
            let mut client = Client::connect(&common.agent.socket).await?;
            let collected = client.garbage.collect_containers(*terminated, common.dry_run).await?;
            print!("{}", plain::lines(&containers(&collected, common.dry_run)));
            if collected.errors.is_empty() { Ok(()) } else { bail!("{}", collected.errors.join("; ")) }
        }
    }
}

fn images(collected: &proto::CollectImagesResponse, dry_run: bool) -> String {
    let row = |image: &proto::CollectedImage| {
        vec![
            image.names.first().cloned().unwrap_or_else(|| "<none>".to_owned()),
            short(&image.id),
            size(image.size_bytes),
            size(image.freed_bytes),
            image.reason.clone(),
        ]
    };
    let titles: &'static [&'static str] = if dry_run {
        &["IMAGE", "ID", "SIZE", "WOULD FREE", "REASON"]
    } else {
        &["IMAGE", "ID", "SIZE", "FREED", "REASON"]
    };
    let mut text = table(titles, &collected.images.iter().map(row).collect::<Vec<_>>());
    collected.why.iter().for_each(|sentence| text += &format!("{sentence}\n"));
    let (count, freed) = (collected.images.len(), size(collected.freed_bytes));
    let noun = if count == 1 { "image" } else { "images" };
    text + &match dry_run {
        true => format!("{count} {noun} would be removed, {freed} freed\n"),
        false => format!("{count} {noun} removed, {freed} freed\n"),
    }
}

fn containers(collected: &proto::CollectContainersResponse, dry_run: bool) -> String {
    let row = |container: &proto::CollectedContainer| {
        vec![
            container.namespace.clone(),
            container.pod.clone(),
            container.name.clone(),
            container.attempt.to_string(),
            short(&container.id),
        ]
    };
    let text = table(
        &["NAMESPACE", "POD", "CONTAINER", "ATTEMPT", "ID"],
        &collected.containers.iter().map(row).collect::<Vec<_>>(),
    );
    let verb = if dry_run { "would be removed" } else { "removed" };
    let (containers, sandboxes) = (collected.containers.len(), collected.sandboxes.len());
    text + &format!("{verb}: containers {containers}, sandboxes {sandboxes}\n")
}

/// Returns the table, or an empty string without rows.
fn table(titles: &'static [&'static str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    Columns::new(titles).table(rows)
}

fn short(id: &str) -> String {
    let id = id.strip_prefix("sha256:").unwrap_or(id);
    id.get(..13).unwrap_or(id).to_owned()
}

/// Returns a size such as `16.6 MiB`, with one decimal.
#[expect(clippy::cast_precision_loss, reason = "displayed with one decimal")]
pub(super) fn size(bytes: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_is_a_table_and_a_sentence() {
        let collected = proto::CollectImagesResponse {
            images: vec![proto::CollectedImage {
                id: format!("sha256:{}", "a".repeat(64)),
                names: vec!["docker.io/library/app:1".to_owned()],
                size_bytes: 2 << 20,
                freed_bytes: 1 << 20,
                reason: "space".to_owned(),
            }],
            freed_bytes: 1 << 20,
            why: vec!["90% of the filesystem is in use".to_owned()],
            ..Default::default()
        };
        let text = images(&collected, false);
        assert!(text.contains("docker.io/library/app:1"), "{text}");
        assert!(
            text.ends_with("90% of the filesystem is in use\n1 image removed, 1.0 MiB freed\n"),
            "{text}"
        );
        assert_eq!(
            images(&proto::CollectImagesResponse::default(), true),
            "0 images would be removed, 0 B freed\n"
        );
    }
}
