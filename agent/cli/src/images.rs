//! `beelet images`: lists, pulls, removes, imports and exports the runtime's images.

mod archive;

use std::path::PathBuf;
use std::process::ExitCode;

use beelet_proto::beelet as proto;
use clap::{Args, Subcommand};
use serde_json::json;

use super::args::{AgentArgs, Output, ShownArgs};
use super::gc::size;
use super::get::columns::Columns;
use super::print::print;
use super::{complete, finish, plain};
use beelet_client::Client;

/// Arguments of `beelet images`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet images ls
  beelet images pull registry.example/web:2
  beelet images rm registry.example/web:1
  beelet images import web.tar          # from docker save, podman save, …
  beelet images export registry.example/web:2 -o web.tar")]
pub struct ImagesArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List the runtime's images with the pods that use them, and the missing images that pods name.
    #[command(visible_alias = "list")]
    Ls(ShownArgs),
    /// Pull an image without credentials.
    Pull(PullArgs),
    /// Remove images and all their names. To remove unused images, use `beelet gc images`.
    Rm(RmArgs),
    /// Import images from archives, without a registry. Requires containerd. The agent imports archives in
    /// the directory `images` next to the manifests by itself.
    Import(ImportArgs),
    /// Export images to an archive.
    Export(ExportArgs),
}

#[derive(Debug, Args)]
struct PullArgs {
    /// Name of the image.
    #[arg(value_name = "IMAGE")]
    image: String,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Args)]
struct RmArgs {
    /// Tags, digests, IDs or the first characters of an ID.
    #[arg(value_name = "IMAGE", required = true, add = complete::images())]
    images: Vec<String>,
    /// Remove images in use too. Running containers keep running but cannot be restarted.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Args)]
struct ImportArgs {
    /// Archives: uncompressed, gzip or zstd; `-` reads standard input.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Name for the only image of the archive, overriding the name in the archive.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, Args)]
struct ExportArgs {
    /// Names of images, or IDs of images that have a name.
    #[arg(value_name = "IMAGE", required = true, add = complete::images())]
    images: Vec<String>,
    /// Archive to write; `-` writes to standard output.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    agent: AgentArgs,
}

const TITLES: &[&str] = &["IMAGE", "ID", "SIZE", "USED BY"];

/// Runs the subcommand.
#[must_use]
pub fn run(args: &ImagesArgs) -> ExitCode {
    finish(async {
        match &args.what {
            What::Ls(args) => list(args).await,
            What::Pull(args) => pull(args).await,
            What::Rm(args) => remove(args).await,
            What::Import(args) => archive::import(args).await,
            What::Export(args) => archive::export(args).await,
        }
    })
}

/// Prints all images.
pub(super) async fn list(args: &ShownArgs) -> anyhow::Result<()> {
    let listed = Client::connect(&args.agent.socket).await?.images.list().await?;
    if args.output == Output::Json {
        return Ok(print(&format!("{:#}\n", value(&listed)))?);
    }
    let rows: Vec<_> = listed.images.iter().map(row).collect();
    print(&Columns::new(TITLES).table(&rows))?;
    for missing in &listed.missing {
        let users = missing.used_by.join(", ");
        eprintln!("{}", plain::line(&format!("missing: {} (used by {users})", missing.name)));
    }
    Ok(())
}

fn row(image: &proto::NodeImage) -> Vec<String> {
    let names = if image.tags.is_empty() { &image.digests } else { &image.tags };
    let id = image.id.strip_prefix("sha256:").unwrap_or(&image.id);
    let sandboxes = image.sandboxes.then(|| "every pod's sandbox".to_owned());
    let pinned = image.pinned.then(|| "(pinned)".to_owned());
    let users: Vec<String> = image.used_by.iter().cloned().chain(sandboxes).chain(pinned).collect();
    let or_none = |text: String| if text.is_empty() { "<none>".to_owned() } else { text };
    vec![
        or_none(names.join(" ")),
        id.chars().take(12).collect(),
        size(image.size_bytes),
        or_none(users.join(", ")),
    ]
}

fn value(listed: &proto::ListImagesResponse) -> serde_json::Value {
    let image = |image: &proto::NodeImage| {
        json!({
            "id": image.id,
            "tags": image.tags,
            "digests": image.digests,
            "sizeBytes": image.size_bytes,
            "pinned": image.pinned,
            "sandboxes": image.sandboxes,
            "usedBy": image.used_by,
        })
    };
    let missing = |one: &proto::MissingImage| json!({"name": one.name, "usedBy": one.used_by});
    json!({
        "images": listed.images.iter().map(image).collect::<Vec<_>>(),
        "missing": listed.missing.iter().map(missing).collect::<Vec<_>>(),
    })
}

async fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let reference = client.images.pull(&args.image).await?;
    println!("{} pulled: {}", args.image, plain::line(&reference));
    Ok(())
}

async fn remove(args: &RmArgs) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    for image in &args.images {
        let removed = client.images.remove(image, args.force).await?;
        let names = removed.map(|image| image.tags.join(" ")).unwrap_or_default();
        println!(
            "{image} removed{}",
            if names.is_empty() { names } else { format!(" ({})", plain::line(&names)) }
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_it_is_called_how_large_and_who_uses_it() {
        let image = proto::NodeImage {
            id: "sha256:0123456789abcdef".to_owned(),
            tags: vec!["example.com/web:1".to_owned()],
            digests: Vec::new(),
            size_bytes: 3 << 20,
            pinned: true,
            used_by: vec!["default/web-n1".to_owned()],
            sandboxes: false,
        };
        assert_eq!(row(&image), ["example.com/web:1", "0123456789ab", "3.0 MiB", "default/web-n1, (pinned)"]);
        assert_eq!(row(&proto::NodeImage::default())[..2], ["<none>", ""]);
        let pause = proto::NodeImage { sandboxes: true, ..proto::NodeImage::default() };
        assert_eq!(row(&pause)[3], "every pod's sandbox");
        let listed = proto::ListImagesResponse { images: vec![image], missing: Vec::new() };
        assert_eq!(value(&listed)["images"][0]["sizeBytes"], 3 << 20);
    }
}
